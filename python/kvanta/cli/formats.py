"""`kvanta formats`: the table of cache formats, the devices that attend to them, and this machine's backends."""

from __future__ import annotations

import argparse
from shutil import get_terminal_size
from typing import Any

from kvanta import attention, formats
from kvanta.cli.arguments import CommandParser
from kvanta.cli.report import add_json, write_report
from kvanta.text_table import render_table

_REFERENCE = "reference"
_DESCRIPTION = """\
The cache formats that --kv-cache-dtype takes. K and V may differ: k=int8,v=int4. Modifiers: +hadamard -hadamard +mean
+query +outliers=N +exact=none|open|2 +sink=N +edges=N, as in int8-hadamard or k=int8+mean,v=int4."""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta formats", description=_DESCRIPTION)
    add_json(result)
    return result


def _text(report: dict[str, Any]) -> str:
    rows = []
    for row in report["formats"]:
        exact = "open page" if row["exact"] == "open" else ""
        if row["sink_pages"]:
            exact += " + first page"
        devices = ", ".join(name for name in row["backends"] if name != _REFERENCE)
        bits = f"{row['bits_per_element']:.4g}"
        rows.append([row["name"], ", ".join(row["aliases"]), bits, devices, exact, row["summary"]])
    table = render_table(
        ["format", "aliases", "bits", "device", "kept in bf16", "description"],
        rows,
        left=(0, 1, 3, 4, 5),
        limit=get_terminal_size((0, 0)).columns,
    )
    devices = "Devices attend to a format as it is stored. The reference, in double precision, attends to all of them."
    backends = f"Backends of this machine: {', '.join(report['backends'])}"
    sizes = "bits: per element at head_dim 128, scales included; of latents at 512 + 64 rotated channels."
    return f"{table}\n\n{sizes}\n{devices}\n{backends}"


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    report = {"formats": formats.table(), "backends": attention.backends()}
    write_report(values.json, report, _text(report))
    return 0
