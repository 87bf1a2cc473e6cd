"""Comparison of another engine's cache formats with Kvanta's of at most the same size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_SAME = ("model", "text_sha256", "tokens", "context")


def measured_alike(peer: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """True if both reports have the same model and windows; older reports name their text without a checksum."""
    same_text = Path(peer["text"]).name == Path(own.get("text") or "").name
    return same_text and all(peer[key] == own[key] for key in _SAME if key in own)


def best_within(formats: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, float], bits: float) -> str | None:
    """Format of the smallest mean divergence among those of at most `bits` per element."""
    fitting = [name for name in formats if name in sizes and sizes[name] <= bits + 1e-9]
    return min(fitting, key=lambda name: float(formats[name]["kl_mean"]), default=None)


def compare(peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[Row]:
    """Adds Kvanta's best format of at most as many bits to each row of `peer`, by pages and by a window's whole cache.

    `peer`: docs/results/llama-cpp.json; `own`: docs/results/eval.json. Keys are missing if nothing fits.
    """
    formats: Mapping[str, Mapping[str, Any]] = own["formats"] if measured_alike(peer, own) else {}
    formats = {name: row for name, row in formats.items() if "kl_mean" in row}
    pages = {name: float(row["bits_per_element"]) for name, row in formats.items()}
    rows = []
    for row in peer["rows"]:
        rotated = ", rotated" if row["rotated"] else ""
        result: Row = {**row, "label": f"{row['format']}{rotated} ({row['bits_per_element']:.4g})"}
        for key, sizes in (("by_pages", pages), ("by_window", peer["kvanta_window_bits"])):
            name = best_within(formats, sizes, row["bits_per_element"])
            if name is not None:
                kl = float(formats[name]["kl_mean"])
                label = f"{name} ({sizes[name]:.4g})"
                result[key] = {"label": label, "format": name, "kl_mean": kl, "times": row["kl_mean"] / kl}
        rows.append(result)
    return rows
