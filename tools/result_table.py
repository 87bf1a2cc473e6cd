"""A table of a document: rows of a result file, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """The command that writes a result file, the key of its rows, and per column: title, key, format.

    `rows` may instead compute them from the result and the folder of all results. `source` is the result file's name
    without .json, if it differs from the block's.
    """

    command: str
    rows: str | Callable[[Mapping[str, Any], Path], Rows]
    columns: tuple[tuple[str, str, str], ...]
    source: str = ""

    def render(self, result: Mapping[str, Any], folder: Path) -> str:
        rows = result[self.rows] if isinstance(self.rows, str) else self.rows(result, folder)
        if isinstance(rows, Mapping):  # by name
            rows = [{"name": name, **row} for name, row in rows.items()]
        cells = [[title, *(_cell(row, key, style) for row in rows)] for title, key, style in self.columns]
        # A column without a value, such as an instruction set that the machine lacks, is left out.
        lines = list(zip(*(column for column in cells if set(column[1:]) != {_NOTHING}), strict=True))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        text.insert(1, " | ".join("-" * (width - 1) + ("-" if i == 0 else ":") for i, width in enumerate(widths)))
        return "".join(f"| {line} |\n" for line in text)


def _cell(row: Any, key: str, style: str) -> str:
    """Formats row["a"]["b"] for "a.b"; a dash if it was not measured."""
    for part in key.split("."):
        if not isinstance(row, Mapping) or row.get(part) is None:
            return _NOTHING
        row = row[part]
    return format(("no", "yes")[row] if isinstance(row, bool) else row, style)
