"""Rows of `kvanta bench attention` for documents: one per format, with a group of columns per number of threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def rows_of_shape(shape: str) -> Callable[[Mapping[str, Any], Path], Sequence[Mapping[str, Any]]]:
    """Selects the rows of one shape; the figures of n threads are under the key "tn"."""

    def rows(result: Mapping[str, Any], _: Path) -> Sequence[Mapping[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for row in result["rows"]:
            if row["shape"] != shape:
                continue
            shares = {
                "memory": row["memory_ns"] / row["ns_median"],
                "dot": row["dot_ns"] / row["ns_median"],
                "in_cache": row["in_cache_ns"] / row["ns_median"],
            }
            each = found.setdefault(row["format"], {"format": row["format"], "isa": row["isa"]})
            each[f"t{row['threads']}"] = {**row, **shares}
        return list(found.values())

    return rows
