"""Options of the benchmarks of kernels, and the machine in their reports."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

from kvanta.cli.arguments import ListOption, real_number, whole_number
from kvanta.cli.machine import cpu_name
from kvanta.cli.report import write_report


def add_numbers(
    parser: argparse.ArgumentParser, flag: str, help_text: str, default: Sequence[int] | None = None
) -> None:
    """Adds an option with a list of whole numbers."""
    parser.add_argument(
        flag, type=whole_number, nargs="+", action=ListOption, default=default, metavar="N", help=help_text
    )


def add_measurement(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Adds --threads (threads_of), --isa and --seconds, whose default is `seconds`."""
    add_numbers(parser, "--threads", "numbers of threads [1 and all]")
    parser.add_argument("--isa", default="auto", metavar="ISA", help="auto or a unit of docs/support.md [auto]")
    parser.add_argument(
        "--seconds", type=real_number, default=seconds, metavar="S", help=f"measured per row [{seconds}]"
    )


def threads_of(values: argparse.Namespace) -> list[int]:
    """Numbers of threads: those given, or one and all."""
    return values.threads or sorted({1, _cpus()})


def this_machine() -> dict[str, Any]:
    """The CPU's model, how many CPUs the process may use, and the operating system."""
    return {"cpu": cpu_name(), "cpus": _cpus(), "system": platform.platform()}


def write_rows(
    path: str | None,
    limits: Sequence[dict[str, Any]],
    limit_line: Callable[[dict[str, Any]], str],
    rows: Sequence[dict[str, Any]],
    table: str,
) -> None:
    """Writes the rows with the machine and its measured limits: as JSON to `path`, or as a text with `table`."""
    machine = this_machine()
    text = "\n".join([f"{machine['cpu']}, {machine['cpus']} CPUs", *map(limit_line, limits), "", table])
    write_report(path, {"machine": machine, "limits": limits, "rows": rows}, text)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
