"""What another engine's cache formats look like beside Kvanta's of at most the same size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_SAME = ("model", "text_sha256", "tokens", "context")


def measured_alike(peer: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether both reports are of the same model and windows; an older report names its text without a sum."""
    same_text = Path(peer["text"]).name == Path(own.get("text") or "").name
    return same_text and all(peer[key] == own[key] for key in _SAME if key in own)


def best_within(formats: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, float], bits: float) -> str | None:
    """The format of least mean divergence among those of at most `bits`."""
    fitting = [name for name in formats if name in sizes and sizes[name] <= bits + 1e-9]
    return min(fitting, key=lambda name: float(formats[name]["kl_mean"]), default=None)


def beside(peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[Row]:
    """Per row of `peer`: Kvanta's best of at most as many bits, by its pages and by all that a window's cache takes.

    `peer`: docs/results/llama-cpp.json; `own`: docs/results/eval.json. Where nothing fits, keys are missing.
    """
    formats: Mapping[str, Mapping[str, Any]] = own["formats"] if measured_alike(peer, own) else {}
    formats = {name: row for name, row in formats.items() if "kl_mean" in row}
    pages = {name: float(row["bits_per_element"]) for name, row in formats.items()}
    rows = []
    for row in peer["rows"]:
        turned = ", rotated" if row["rotated"] else ""
        result: Row = {**row, "label": f"{row['format']}{turned} ({row['bits_per_element']:.4g})"}
        for key, sizes in (("by_pages", pages), ("by_window", peer["kvanta_window_bits"])):
            name = best_within(formats, sizes, row["bits_per_element"])
            if name is not None:
                kl = float(formats[name]["kl_mean"])
                label = f"{name} ({sizes[name]:.4g})"
                result[key] = {"label": label, "format": name, "kl_mean": kl, "times": row["kl_mean"] / kl}
        rows.append(result)
    return rows
