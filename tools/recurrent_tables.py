"""The tables of docs/results/*.json about layers with a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from result_table import Rows, Table


def _speed(result: Mapping[str, Any], _: Path) -> Rows:
    def work(row: Mapping[str, Any]) -> str:
        return f"decode of {row['sequences']}" if row["tokens"] == 1 else f"prompt of {row['tokens']:,}"

    return [{**row, "work": work(row), "milliseconds": row["ns"] / 1e6} for row in result["rows"]]


def _accuracy(result: Mapping[str, Any], _: Path) -> Rows:
    return [{**row, "first": row["kl_of_parts"][0], "last": row["kl_of_parts"][-1]} for row in result["rows"]]


RECURRENT_TABLES = {
    "state-codes": Table(
        "python benchmarks/state_codes.py models/novels3m --text wiki.test.raw --json docs/results/state-codes.json",
        _accuracy,
        (
            ("states", "code", ""),
            ("mean KL", "kl_mean", ".6f"),
            ("99 %", "kl_p99", ".5f"),
            ("after 1 to 4 roundings", "first", ".6f"),
            ("after 13 to 16", "last", ".6f"),
        ),
    ),
    "recurrent": Table(
        "kvanta bench recurrent --json docs/results/recurrent.json",
        _speed,
        (
            ("layer of", "layer", ""),
            ("operation", "kernel", ""),
            ("threads", "threads", "d"),
            ("work", "work", ""),
            ("ms", "milliseconds", ".3f"),
            ("of memory", "share_of_memory", ".0%"),
            ("of peak", "share_of_peak", ".0%"),
        ),
    ),
}
