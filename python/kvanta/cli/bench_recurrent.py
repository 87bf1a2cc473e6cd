"""`kvanta bench recurrent`: speed of the layers with a state of hybrid models."""

from __future__ import annotations

import argparse
from typing import Any

from kvanta import _core
from kvanta.cli.arguments import CommandParser, ListOption
from kvanta.cli.kernel_bench import add_measurement, add_numbers, threads_of, write_rows
from kvanta.cli.report import add_json
from kvanta.errors import InputError
from kvanta.terminal.progress import progress_bar
from kvanta.terminal.tables import render_table

_DESCRIPTION = """\
Speed of a hybrid's layers with a state, without their projections, in the shapes of published models. Decode is limited
by reading and writing the states of all sequences, a prompt by multiply-adds: both limits are measured in the same run.
Results are verified first: against the portable unit, and bit by bit against single tokens.

  kvanta bench recurrent --layers qwen3.6-27b nemotron-3-nano --decode 1 16 --prompt 512 --threads 1 2"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta bench recurrent", description=_DESCRIPTION)
    names = _core.recurrent_layers()
    result.add_argument(
        "--layers", nargs="+", action=ListOption, default=names, metavar="NAME", help=f"of {', '.join(names)} [all]"
    )
    add_numbers(result, "--decode", "sequences with a token each in a step [1 16]", default=[1, 16])
    add_numbers(result, "--prompt", "tokens of one sequence in a step [512]", default=[512])
    add_measurement(result, 0.3)
    add_json(result)
    return result


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["layer"],
        row["kernel"],
        row["isa"],
        str(row["threads"]),
        f"decode of {row['sequences']}" if row["tokens"] == 1 else f"prompt of {row['tokens']:,}",
        f"{row['ns'] / 1e6:.3f}",
        f"{row['bytes_per_second'] / 1e9:.1f}",
        f"{row['share_of_memory']:.0%}",
        f"{row['operations_per_second'] / 1e9:.1f}",
        f"{row['share_of_peak']:.0%}",
    ]


def _limit_line(limit: dict[str, Any]) -> str:
    updated, operations = limit["updated_bytes_per_second"] / 1e9, limit["operations_per_second"] / 1e9
    threads = f"{limit['threads']} thread{'s' if limit['threads'] > 1 else ''}"
    return f"{threads}: memory is updated at {updated:.1f} GB/s, multiply-adds do {operations:.1f} GFLOP/s"


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    threads = threads_of(values)
    # Beyond 32 bits nothing fits what the library takes.
    if not all(1 <= count < 2**31 for count in [*threads, *values.decode, *values.prompt]):
        raise InputError(
            f"threads are {threads}, decode is {values.decode}, prompts are {values.prompt}; each must be at least 1"
        )
    work = [(sequences, 1) for sequences in values.decode] + [(1, tokens) for tokens in values.prompt]
    limits: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with progress_bar(len(threads) * (1 + len(values.layers) * len(work)), "measuring", "row") as bar:
        for count in threads:
            measured: list[dict[str, Any]] = []
            for layer in values.layers:
                for sequences, tokens in work:
                    measured.append(
                        _core.run_recurrent_bench(layer, values.isa, count, sequences, tokens, values.seconds)
                    )
                    bar.update()
            updated, operations = _core.recurrent_limits(values.isa, count)
            limits.append({"threads": count, "updated_bytes_per_second": updated, "operations_per_second": operations})
            bar.update()
            for row in measured:
                row["share_of_memory"] = row["bytes_per_second"] / updated
                row["share_of_peak"] = row["operations_per_second"] / operations
            rows += measured
    header = ["layer", "kernel", "isa", "threads", "work", "ms", "GB/s", "of memory", "GFLOP/s", "of peak"]
    table = render_table(header, [_cells(row) for row in rows], left=(0, 1, 2, 4))
    write_rows(values.json, limits, _limit_line, rows, table)
    return 0
