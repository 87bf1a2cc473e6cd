"""`kvanta bench attention`: speed of the attention kernels on really quantized pages."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from kvanta import _core, attention
from kvanta.cli.arguments import CommandParser, real_number, whole_number
from kvanta.cli.machine import cpu_name
from kvanta.cli.report import add_json, write_report
from kvanta.errors import InputError
from kvanta.progress import progress_bar
from kvanta.text_table import human_bytes, render_table

_DESCRIPTION = """\
Speed of the attention kernels, every result verified against the reference first. GB/s are stored cache bytes; the
share is of what this machine reads from memory with as many threads.

  kvanta bench attention --formats bf16 int8 int4 --threads 1 2"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta bench attention", description=_DESCRIPTION)
    result.add_argument("--formats", nargs="+", metavar="FORMAT", help="cache formats [all]")
    result.add_argument("--heads", type=whole_number, default=32, metavar="N", help="query heads [32]")
    result.add_argument("--kv-heads", type=whole_number, default=8, metavar="N", help="key and value heads [8]")
    result.add_argument("--head-dim", type=whole_number, default=128, metavar="N", help="size of a head [128]")
    result.add_argument("--context", type=whole_number, default=32768, metavar="N", help="tokens in the cache [32768]")
    result.add_argument("--batch", type=whole_number, default=1, metavar="N", help="sequences [1]")
    result.add_argument(
        "--query-tokens", type=whole_number, default=1, metavar="N", help="1: decode; more: prefill [1]"
    )
    result.add_argument("--page-size", "--block-size", type=whole_number, default=64, metavar="N", help="[64]")
    result.add_argument("--threads", type=whole_number, nargs="+", metavar="N", help="numbers of threads [1 and all]")
    result.add_argument("--isa", default="auto", metavar="ISA", help="auto, avx512, avx2 or portable [auto]")
    result.add_argument("--seconds", type=real_number, default=0.5, metavar="S", help="measured per row [0.5]")
    add_json(result)
    return result


def _row_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["format"],
        row["isa"],
        str(row["threads"]),
        human_bytes(row["bytes"]),
        f"{row['ns_median'] / 1e6:.3f}",
        f"{row['gb_s']:.2f}",
        f"{row['gelem_s']:.2f}",
        f"{row['share_of_limit']:.0%}",
        f"{row['max_error']:.1e}",
    ]


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    cpus = len(os.sched_getaffinity(0))
    threads = values.threads or sorted({1, cpus})
    if any(count < 1 for count in threads):
        raise InputError(f"threads are {threads}; each must be at least 1")
    # The shapes are those of K and V apart.
    formats = values.formats or [row["name"] for row in _core.format_table() if row["latents"] != "only"]
    limits: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    with progress_bar(len(threads) + len(formats) * len(threads), "measuring", "row") as bar:
        for count in threads:
            limits[count] = attention.read_limit_gb_s(count, values.isa)
            bar.update()
        for name in formats:
            for count in threads:
                rows += attention.bench(
                    formats=[name],
                    isa=values.isa,
                    threads=[count],
                    limit_gb_s=[limits[count]],
                    heads=values.heads,
                    kv_heads=values.kv_heads,
                    head_dim=values.head_dim,
                    page_size=values.page_size,
                    batch=values.batch,
                    context=values.context,
                    query_tokens=values.query_tokens,
                    seconds=values.seconds,
                )
                bar.update()
    machine = {"cpu": cpu_name(), "cpus": cpus, "system": platform.platform(), "backends": attention.backends()}
    report = {"machine": machine, "limit_gb_s": {str(count): limit for count, limit in limits.items()}, "rows": rows}
    header = ["format", "isa", "threads", "cache", "ms", "GB/s", "Gelem/s", "of limit", "max error"]
    title = f"{machine['cpu']}, {cpus} CPUs; memory reads " + ", ".join(
        f"{limit:.1f} GB/s with {count} thread{'s' if count > 1 else ''}" for count, limit in limits.items()
    )
    write_report(
        values.json, report, f"{title}\n\n{render_table(header, [_row_cells(row) for row in rows], left=(0, 1))}"
    )
    return 0
