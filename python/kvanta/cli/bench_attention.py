"""`kvanta bench attention`: speed of the attention kernels on really quantized pages."""

from __future__ import annotations

import argparse
import platform
from statistics import median
from typing import Any

from kvanta import _core, attention
from kvanta.cli.arguments import CommandParser, ListOption, whole_number
from kvanta.cli.attention_plot import write_plot
from kvanta.cli.kernel_bench import add_measurement, this_machine, threads_of
from kvanta.cli.machine import cpu_name
from kvanta.cli.report import add_json, output_file, write_report
from kvanta.errors import InputError
from kvanta.terminal.pictures import check_picture
from kvanta.terminal.progress import progress_bar
from kvanta.terminal.tables import human_bytes, render_table

_DESCRIPTION = """\
Speed of the attention kernels, every result verified against the reference first. Each row is compared with what this
machine would need at least, measured in turns with it: the time to read the stored bytes from memory, and the time of
the multiply-adds at the peak of those that the format's kernels are made of. The limit is the larger of both.

  kvanta bench attention --formats bf16 int8 int4 --threads 1 2
  kvanta bench attention --shapes all --json attention.json --plot attention.png

With --device cuda: on this machine's GPU, by its own clock; the limit is the bandwidth of a copy of its memory.

  kvanta bench attention --device cuda --formats bf16 fp8 int4 nvfp4 --batch 64 --context 8192"""

_SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"title": "decode at 32,768 tokens", "batch": 1, "context": 32768, "query_tokens": 1},
    "batch": {"title": "decode of 8 x 4,096 tokens", "batch": 8, "context": 4096, "query_tokens": 1},
    "decode-1k": {"title": "decode at 1,024 tokens", "batch": 1, "context": 1024, "query_tokens": 1},
    "short": {"title": "decode of 1,000 x 64 tokens", "batch": 1000, "context": 64, "query_tokens": 1},
    "prefill": {"title": "512 tokens at depth 16,384", "batch": 1, "context": 16384, "query_tokens": 512},
}
_OWN = {"batch": 1, "context": 32768, "query_tokens": 1}


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta bench attention", description=_DESCRIPTION)
    result.add_argument("--formats", nargs="+", action=ListOption, metavar="FORMAT", help="cache formats [all]")
    result.add_argument("--heads", type=whole_number, default=32, metavar="N", help="query heads [32]")
    result.add_argument("--kv-heads", type=whole_number, default=8, metavar="N", help="key and value heads [8]")
    result.add_argument("--head-dim", type=whole_number, default=128, metavar="N", help="size of a head [128]")
    result.add_argument(
        "--layers", type=whole_number, metavar="N", help="layers that a page holds; each run is over the next one [1]"
    )
    result.add_argument("--context", type=whole_number, metavar="N", help="tokens in the cache [32768]")
    result.add_argument("--batch", type=whole_number, metavar="N", help="sequences [1]")
    result.add_argument("--query-tokens", type=whole_number, metavar="N", help="1: decode; more: prefill [1]")
    result.add_argument(
        "--shapes",
        nargs="+",
        action=ListOption,
        choices=[*_SHAPES, "all"],
        metavar="SHAPE",
        help="instead of these three: "
        + "; ".join(f"{name}: {shape['title']}" for name, shape in _SHAPES.items())
        + "; all",
    )
    result.add_argument("--page-size", "--block-size", type=whole_number, default=64, metavar="N", help="[64]")
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="[cpu]")
    add_measurement(result, 0.5)
    result.add_argument(
        "--plot", type=output_file, metavar="FILE", help="plot of shares and of speed against bf16: .png, .svg or .pdf"
    )
    add_json(result)
    return result


def _binds(row: dict[str, Any]) -> str:
    """The longest part of a run."""
    parts = {"memory": row["memory_ns"], "dot": row["dot_ns"], "kernel": row["in_cache_ns"]}
    return max(parts, key=lambda part: parts[part])


def _row_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["format"],
        row["isa"],
        str(row["threads"]),
        human_bytes(row["bytes"]),
        f"{row['ns_median'] / 1e6:.3f}",
        f"{row['memory_ns'] / 1e6:.3f}",
        f"{row['dot_ns'] / 1e6:.3f}",
        f"{row['in_cache_ns'] / 1e6:.3f}",
        row["binds"],
        f"{row['share_of_limit']:.0%}",
        f"{row['share_of_bf16_peak']:.0%}",
        f"{row['times_bf16']:.2f}",
        f"{row['max_error']:.1e}",
    ]


_GPU_FORMATS = ["bf16", "fp8_e4m3", "int8", "int4", "nvfp4"]
_GPU_HEADER = ["format", "unit", "cache", "us", "GB/s", "copy GB/s", "of copy", "max error"]


def _gpu_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["format"],
        row["unit"],
        human_bytes(row["bytes"]),
        f"{row['ns_median'] / 1e3:.1f}",
        f"{row['gb_s']:.0f}",
        f"{row['copy_gb_s']:.0f}",
        f"{row['share_of_limit']:.0%}",
        f"{row['max_error']:.1e}",
    ]


_HEADER = ["format", "isa", "threads", "cache", "ms", "memory ms", "dot ms", "in-cache ms", "bound by", "of limit"]
_HEADER += ["of bf16 peak", "times bf16", "max error"]


def _shapes(values: argparse.Namespace) -> dict[str, dict[str, Any]]:
    own = {name: getattr(values, name) for name in _OWN if getattr(values, name) is not None}
    if values.shapes is None:
        shape = {**_OWN, **own}
        return {"own": {"title": "{batch:,} x {context:,} tokens, {query_tokens:,} new".format(**shape), **shape}}
    for name in own:
        raise InputError(f"--shapes and --{name.replace('_', '-')} both say what is measured; give one of them")
    return {name: shape for name, shape in _SHAPES.items() if name in values.shapes or "all" in values.shapes}


def _run_gpu(values: argparse.Namespace) -> int:
    for name in ("threads", "plot", "layers"):
        if getattr(values, name) is not None:
            raise InputError(f"--{name} is of the CPU's bench, not of --device cuda")
    if values.isa != "auto":
        raise InputError("--isa is of the CPU's bench, not of --device cuda")
    shapes = _shapes(values)
    formats = values.formats or _GPU_FORMATS
    rows: list[dict[str, Any]] = []
    with progress_bar(len(shapes) * len(formats), "measuring", "row") as bar:
        for name, shape in shapes.items():
            measured = attention.bench_gpu(
                formats=formats,
                heads=values.heads,
                kv_heads=values.kv_heads,
                head_dim=values.head_dim,
                page_size=values.page_size,
                batch=shape["batch"],
                context=shape["context"],
                query_tokens=shape["query_tokens"],
                seconds=values.seconds,
                measured=bar.update,
            )
            rows += [{"shape": name, **row} for row in measured]
    copy = median(row["copy_gb_s"] for row in rows)
    report = {
        "machine": {"cpu": cpu_name(), "system": platform.platform(), "backends": attention.backends()},
        "limit_gb_s": {"copy": copy},
        "shapes": shapes,
        "rows": rows,
    }
    parts = [f"{rows[0]['unit']}; a copy of its memory: {copy:.0f} GB/s"]
    for name, shape in shapes.items():
        cells = [_gpu_cells(row) for row in rows if row["shape"] == name]
        parts += ["", f"{shape['title']}:", "", render_table(_GPU_HEADER, cells, left=(0, 1))]
    write_report(values.json, report, "\n".join(parts))
    return 0


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    if values.device == "cuda":
        return _run_gpu(values)
    threads = threads_of(values)
    if any(count < 1 for count in threads):
        raise InputError(f"threads are {threads}; each must be at least 1")
    shapes = _shapes(values)
    if values.plot is not None:
        check_picture(values.plot)
    # The shapes are those of K and V apart.
    formats = values.formats or [row["name"] for row in _core.format_table() if row["latents"] != "only"]
    rows: list[dict[str, Any]] = []
    with progress_bar(len(shapes) * len(formats) * len(threads), "measuring", "row") as bar:
        for name, shape in shapes.items():
            measured = attention.bench(
                formats=formats,
                isa=values.isa,
                threads=threads,
                heads=values.heads,
                kv_heads=values.kv_heads,
                head_dim=values.head_dim,
                page_size=values.page_size,
                layers=1 if values.layers is None else values.layers,
                batch=shape["batch"],
                context=shape["context"],
                query_tokens=shape["query_tokens"],
                seconds=values.seconds,
                measured=bar.update,
            )
            rows += [{"shape": name, **row, "binds": _binds(row)} for row in measured]
    report = {
        "machine": this_machine() | {"backends": attention.backends()},
        "limit_gb_s": {
            str(count): median(row["read_gb_s"] for row in rows if row["threads"] == count) for count in threads
        },
        "shapes": shapes,
        "rows": rows,
    }
    write_report(values.json, report, _text(report))
    if values.plot is not None:
        write_plot(values.plot, report)
    return 0


def _text(report: dict[str, Any]) -> str:
    machine = report["machine"]
    limits = ", ".join(
        f"{limit:.1f} GB/s with {count} thread{'s' if count != '1' else ''}"
        for count, limit in report["limit_gb_s"].items()
    )
    parts = [f"{machine['cpu']}, {machine['cpus']} CPUs; memory reads {limits}"]
    for name, shape in report["shapes"].items():
        cells = [_row_cells(row) for row in report["rows"] if row["shape"] == name]
        parts += ["", f"{shape['title']}:", "", render_table(_HEADER, cells, left=(0, 1))]
    return "\n".join(parts)
