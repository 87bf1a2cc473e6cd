"""The table of an evaluation, which grows by a line as each format is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.terminal.tables import width


@dataclass(frozen=True)
class _Column:
    title: str
    size: int
    cell: Callable[[Mapping[str, Any]], str]


def _kl(row: Mapping[str, Any]) -> str:
    low, high = row["kl_mean_ci95"]
    return f"{row['kl_mean']:.6f} ({low:.6f} to {high:.6f})"


_MEMORY = (
    _Column("bits", 6, lambda row: f"{row['bits_per_element']:.4g}"),
    _Column("bytes/token", 11, lambda row: f"{row['bytes_per_token']:,.0f}"),
)
_TASKS: Mapping[str, tuple[_Column, ...]] = {
    "kl": (
        _Column("mean KL (95 %)", 31, _kl),
        _Column("median", 8, lambda row: f"{row['kl_median']:.5f}"),
        _Column("99 %", 7, lambda row: f"{row['kl_p99']:.4f}"),
        _Column("max", 6, lambda row: f"{row['kl_max']:.3f}"),
        _Column("same top", 8, lambda row: f"{row['top1']:.1%}"),
        _Column("ppl ratio", 9, lambda row: f"{row['ppl_ratio']:.4f}"),
    ),
    "needle": (_Column("needles", 7, lambda row: f"{row['needle']:.0%}"),),
    "generation": (
        _Column("equal start", 11, lambda row: f"{row['generation']['equal_tokens_mean']:.1f}"),
        _Column("KL there", 8, lambda row: f"{row['generation']['kl_mean']:.5f}"),
    ),
}
_LAST = (_Column("clipped", 7, lambda row: f"{row['saturated']:,}"),)

_MEANING = {
    "kl": "KL(reference || format) in nats per token; same top: share of equal most likely tokens.",
    "needle": "needles: share of the hidden facts that were found.",
    "generation": "equal start: tokens of a greedy answer up to the first that differs; KL there: along the reference",
}


class EvaluationTable:
    """Lines of equal columns; `names` are the formats that will come."""

    def __init__(self, names: Sequence[str], tasks: Sequence[str]) -> None:
        self._tasks = [name for name in _TASKS if name in tasks]
        self._columns = [*_MEMORY, *(column for name in self._tasks for column in _TASKS[name]), *_LAST]
        self._size = max(map(width, [*names, "format"]))

    def _line(self, name: str, cells: Sequence[str]) -> str:
        padded = [cell.rjust(column.size) for cell, column in zip(cells, self._columns, strict=True)]
        return "  " + "   ".join([name + " " * (self._size - width(name)), *padded])

    def header(self) -> str:
        """The titles and the rule below them."""
        sizes = [self._size, *(column.size for column in self._columns)]
        rule = "───".join("─" * size for size in sizes)
        return f"{self._line('format', [column.title for column in self._columns])}\n  {rule}"

    def row(self, name: str, figures: Mapping[str, Any]) -> str:
        """One format's line."""
        return self._line(name, [column.cell(figures) for column in self._columns])

    def footer(self, ci95_over: str | None) -> str:
        """Legend of the columns; `ci95_over`: unit of the confidence intervals."""
        lines = [f"  {_MEANING[name]}" for name in self._tasks]
        return "\n".join([*lines, *([f"  95 %: bootstrap over {ci95_over}."] if ci95_over else [])])
