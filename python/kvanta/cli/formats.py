"""`kvanta formats`: the table of cache formats, the devices that attend to them, and this machine's backends."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from kvanta import attention, formats
from kvanta.cli.arguments import CommandParser
from kvanta.cli.help_page import page_width
from kvanta.cli.report import add_json, write_report
from kvanta.terminal.tables import render_table

_REFERENCE = "reference"
_UNDER = " " * 6  # a description is below its row
_DESCRIPTION = """\
The cache formats that --kv-cache-dtype takes. K and V may differ: k=int8,v=int4. Modifiers: +hadamard -hadamard +mean
+query +outliers=N +exact=none|open|2 +sink=N +edges=N, as in int8-hadamard or k=int8+mean,v=int4."""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta formats", description=_DESCRIPTION)
    add_json(result)
    return result


def _description(row: dict[str, Any]) -> str:
    """Description, with the pages that stay in bf16 unless it names them."""
    if row["exact"] != "open" or "exact" in row["summary"]:
        return str(row["summary"])
    return f"{row['summary']}; open {'and first ' if row['sink_pages'] else ''}page exact"


def _text(report: dict[str, Any]) -> str:
    rows = []
    for row in report["formats"]:
        devices = ", ".join(name for name in row["backends"] if name != _REFERENCE)
        rows.append([row["name"], ", ".join(row["aliases"]), f"{row['bits_per_element']:.4g}", devices])
    first, rule, *lines = render_table(["format", "aliases", "bits", "device"], rows, left=(0, 1, 3)).splitlines()
    parts = [first, rule]
    for line, row in zip(lines, report["formats"], strict=True):
        parts += [line, textwrap.fill(_description(row), page_width(), initial_indent=_UNDER, subsequent_indent=_UNDER)]
    notes = [
        "bits: per element at head_dim 128, scales included; of latents at 512 + 64 rotated channels.",
        "Devices attend to a format in its stored form. The reference, in double precision, attends to all of them.",
        f"Backends of this machine: {', '.join(report['backends'])}",
    ]
    return "\n".join([*parts, "", *(textwrap.fill(note, page_width()) for note in notes)])


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    report = {"formats": formats.table(), "backends": attention.backends()}
    write_report(values.json, report, _text(report))
    return 0
