"""Plain tables and human sizes for the terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def width(text: str) -> int:
    """Columns that `text` takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(1 for character in text if unicodedata.combining(character))


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Lines with a rule below the header; columns in `left` are aligned to the left, the others to the right."""
    widths = [max(width(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        parts = []
        for column, cell in enumerate(cells):
            padding = " " * (widths[column] - width(cell))
            parts.append(cell + padding if column in left else padding + cell)
        return ("  " + "   ".join(parts)).rstrip()

    rule = "  " + "───".join("─" * size for size in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"; plain bytes below 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
