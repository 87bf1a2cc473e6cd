"""Plain tables and human sizes for the terminal."""

from __future__ import annotations

import itertools
import textwrap
import unicodedata
from collections.abc import Sequence

_MIN_COLUMN = 12  # to which a text is wrapped


def width(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(1 for character in text if unicodedata.combining(character))


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,), limit: int = 0
) -> str:
    """Lines with a rule below the header; columns in `left` are aligned to the left, the others to the right.

    `limit`: columns of the terminal; the texts of `left`, but for the first, are wrapped to fit. 0: none.
    """
    rows = _wrapped([header, *rows], left[1:], limit)[1:] if limit else rows
    widths = [max(width(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = []
        for column, cell in enumerate(cells):
            padding = " " * (widths[column] - width(cell))
            parts.append(cell + padding if column in left else padding + cell)
        return ("  " + "   ".join(parts)).rstrip()

    rule = "  " + "───".join("─" * size for size in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def _wrapped(rows: Sequence[Sequence[str]], columns: Sequence[int], limit: int) -> list[list[str]]:
    """The rows with texts of `columns` over several lines, each of which is a row."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 3 * len(widths) > limit + 1 and max(widths[column] for column in columns) > _MIN_COLUMN:
        widths[max(columns, key=lambda column: widths[column])] -= 1
    lines: list[list[str]] = []
    for row in rows:
        cells = [textwrap.wrap(cell, widths[index]) if index in columns else [cell] for index, cell in enumerate(row)]
        lines += map(list, itertools.zip_longest(*cells, fillvalue=""))
    return lines


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"; plain bytes below 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
