"""Tables of linear layers in documents: two instruction sets compared, and torch compared with Kvanta."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ISA_COLUMNS = (
    ("layer", "layer", ""),
    ("rows", "rows", ",d"),
    ("1 thread: of memory", "t1.share_of_read", ".0%"),
    ("of the dot's peak", "t1.share_of_peak", ".0%"),
    ("times avx512's time", "t1.of_other", ".2f"),
    ("2 threads: of memory", "t2.share_of_read", ".0%"),
    ("of the dot's peak", "t2.share_of_peak", ".0%"),
    ("times avx512's time", "t2.of_other", ".2f"),
)
TORCH_COLUMNS = (
    ("layer (in x out)", "layer", ""),
    ("rows", "rows", ",d"),
    ("torch's time over Kvanta's", "times_torch", ".2f"),
    ("Kvanta: of the dot's peak", "share_of_peak", ".0%"),
    ("torch: of the dot's peak", "torch_share_of_peak", ".0%"),
)


def compare_isa(other: str) -> Callable[[Mapping[str, Any], Path], Sequence[Mapping[str, Any]]]:
    """Makes a row per layer and number of rows; "tn" has n threads' figures and their share of `other`'s time."""

    def rows(result: Mapping[str, Any], folder: Path) -> Sequence[Mapping[str, Any]]:
        others = json.loads((folder / f"linear-{other}.json").read_text())["rows"]
        times = {_work(row): row["ns"] for row in others}
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for row in result["rows"]:
            layer, count, threads = _work(row)
            each = found.setdefault((layer, count), {"layer": layer, "rows": count})
            each[f"t{threads}"] = {**row, "of_other": row["ns"] / times[layer, count, threads]}
        return list(found.values())

    return rows


def _work(row: Mapping[str, Any]) -> tuple[str, int, int]:
    return f"{row['in']} x {row['out']}", row["rows"], row["threads"]
