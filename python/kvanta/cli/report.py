"""--json FILE|-: the figures of a command, for programs. Those that are not finite are null."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kvanta.errors import ResourceError, reason_of
from kvanta.files.json_file import finite_values


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option."""
    parser.add_argument(
        "--json",
        type=output_file,
        metavar="FILE",
        help="write the figures as JSON to FILE; - is the standard output",
    )


def output_file(target: str) -> str:
    """Type of an argument: a file that is written when the work is done must not fail for its folder then."""
    file = Path(target).absolute()
    if target != "-" and not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(file.parent)!r}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{target!r} is a folder")
    return target


def write_report(target: str | None, report: dict[str, Any], text: str) -> None:
    """Prints `text` for people, unless the JSON report goes to the standard output."""
    if target == "-":
        only_ascii = "utf" not in (sys.stdout.encoding or "").lower()  # else other characters would become "?"
        json.dump(finite_values(report), sys.stdout, indent=1, ensure_ascii=only_ascii)
        sys.stdout.write("\n")
        return
    print(text)
    if target is not None:
        write_json_file(target, report)


def write_json_file(target: str, report: dict[str, Any]) -> None:
    """Raises ResourceError if the file cannot be written."""
    try:
        text = json.dumps(finite_values(report), indent=1, ensure_ascii=False) + "\n"
        Path(target).write_text(text, encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise ResourceError(f"cannot write {target!r}: {reason_of(error)}") from None
