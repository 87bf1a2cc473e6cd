"""`kvanta bench linear`: speed of linear layers per weight type."""

from __future__ import annotations

import argparse
import re
from typing import Any

from kvanta import _core
from kvanta.cli.arguments import CommandParser, ListOption
from kvanta.cli.kernel_bench import add_measurement, add_numbers, threads_of, write_rows
from kvanta.cli.report import add_json
from kvanta.errors import InputError
from kvanta.terminal.progress import progress_bar
from kvanta.terminal.tables import render_table

_DESCRIPTION = """\
Speed of linear layers, every result verified against double precision first. Few rows are limited by reading weights
from memory, many by the dot product: both limits are measured in the same run. Layers are INxOUT, by default those of
SmolLM2-135M and a large square.

  kvanta bench linear --weights bf16 int8 int4 --rows 1 1024 --threads 1 2"""
_WEIGHTS = ("bf16", "int8", "int4")
# q k v together, o, gate and up together, down, logits.
_SMOLLM2 = ("576x960", "576x576", "576x3072", "1536x576", "576x49152")


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta bench linear", description=_DESCRIPTION)
    result.add_argument(
        "--weights",
        nargs="+",
        action=ListOption,
        default=_WEIGHTS,
        metavar="TYPE",
        help="bf16, f16, f32, int8, int4; codes of checkpoints: fp8, w8a16, w4a16, nf4; or blocks of GGUF files: "
        "Q4_K, Q6_K, ... [bf16 int8 int4]",
    )
    result.add_argument(
        "--layers",
        nargs="+",
        action=ListOption,
        default=(*_SMOLLM2, "4096x4096"),
        metavar="INxOUT",
        help="sizes [SmolLM2-135M's, 4096x4096]",
    )
    add_numbers(result, "--rows", "1: decode [1 8 64 1024]", default=[1, 8, 64, 1024])
    add_measurement(result, 0.3)
    add_json(result)
    return result


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text)
    if found is None:
        raise InputError(f"a layer is {text!r}; expected INxOUT, as 576x3072")
    return int(found[1]), int(found[2])


def _row_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["weights"],
        row["isa"],
        str(row["threads"]),
        f"{row['in']}x{row['out']}",
        str(row["rows"]),
        f"{row['ns'] / 1e6:.3f}",
        f"{row['bytes_per_second'] / 1e9:.1f}",
        f"{row['share_of_read']:.0%}",
        f"{row['operations_per_second'] / 1e9:.1f}",
        f"{row['share_of_peak']:.0%}",
    ]


def _limit_line(limit: dict[str, Any]) -> str:
    read, operations = limit["read_bytes_per_second"] / 1e9, limit["operations_per_second"] / 1e9
    threads = f"{limit['threads']} thread{'s' if limit['threads'] > 1 else ''}"
    return f"{limit['weights']}, {threads}: memory reads {read:.1f} GB/s, the dot does {operations:.1f} GFLOP/s"


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    threads = threads_of(values)
    # Beyond 32 bits nothing fits what the library takes.
    if not all(1 <= count < 2**31 for count in [*threads, *values.rows]):
        raise InputError(f"threads are {threads}, rows are {values.rows}; each must be at least 1")
    shapes = [_shape(text) for text in values.layers]
    limits: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with progress_bar(len(values.weights) * len(threads) * (1 + len(shapes)), "measuring", "layer") as bar:
        for weights in values.weights:
            for count in threads:
                measured: list[dict[str, Any]] = []
                for size_in, size_out in shapes:
                    measured += _core.run_linear_bench(
                        weights, values.isa, count, size_in, size_out, values.rows, values.seconds
                    )
                    bar.update()
                # After the layers, whose sizes may be refused: it takes seconds.
                read, operations = _core.linear_limits(weights, values.isa, count)
                limit = {"weights": weights, "threads": count}
                limits.append({**limit, "read_bytes_per_second": read, "operations_per_second": operations})
                bar.update()
                for row in measured:
                    row["share_of_read"] = row["bytes_per_second"] / read
                    row["share_of_peak"] = row["operations_per_second"] / operations
                rows += measured
    header = ["weights", "isa", "threads", "layer", "rows", "ms", "GB/s", "of memory", "GFLOP/s", "of peak"]
    table = render_table(header, [_row_cells(row) for row in rows], left=(0, 1, 3))
    write_rows(values.json, limits, _limit_line, rows, table)
    return 0
