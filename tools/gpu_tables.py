"""The tables of docs/results/gpu-*.json: attention, other engines' kernels, the engine, and machine code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from result_table import Rows, Table

_SHAPES = ("64 x 8192", "1 x 131072", "1000 x 512")
_PEERS = (
    "torch-sdpa-flash",
    "torch-sdpa-cudnn",
    "flashinfer-fa2 bf16 page 64",
    "flashinfer-fa2 fp8 page 64",
    "flashinfer-xqa fp8 page 64",
    "flashinfer-fa2 nvfp4 page 64",
    "flashinfer-mla-fa3 bf16 page 64",
)


def _by_shape(rows: Iterable[tuple[str, str, float, float]]) -> Rows:
    """One row per name, of (name, shape, microseconds, share of the copy bandwidth)."""
    table: dict[str, dict[str, Any]] = {}
    for name, shape, microseconds, share in rows:
        table.setdefault(name, {"name": name})[shape] = {"us": microseconds, "share": share}
    return list(table.values())


def _attention(result: Any, _: Path) -> Rows:
    return _by_shape(
        (row["format"], f"{row['batch']} x {row['context']}", row["ns_median"] / 1e3, row["share_of_limit"])
        for row in result
    )


def _peers(result: Mapping[str, Any], _: Path) -> Rows:
    return _by_shape(
        (row["peer"], row["case"], row["us"], row["copy_share"])
        for peer in _PEERS
        for row in result["results"]
        if row["peer"] == peer
    )


def _engine(result: Any, _: Path) -> Rows:
    return [row for row in result if row["decode_step_ms"] > 0]


_ATTENTION_KERNEL = re.compile(r"(Attention|Group)Entry<StaticKernel<(\w+), (\w+), 128, (\d)> ?>")
_LATENT_KERNEL = re.compile(r"LatentGroupEntry<(\w+)>")
_LATENT_ROWS = 32  # of a warp
_GROUP_TILES = 4


def _kernels(result: Mapping[str, Any], _: Path) -> Rows:
    rows = []
    for kernel in result["kernels"]:
        path = kernel["path"]
        if name := _ATTENTION_KERNEL.fullmatch(kernel["kernel"]):
            of_warp = 8 * int(name[4])
            title = name[2] if name[2] == name[3] else f"{name[2]}, {name[3]}"
            of_block = of_warp * (_GROUP_TILES if name[1] == "Group" else 1)
        elif name := _LATENT_KERNEL.fullmatch(kernel["kernel"]):
            of_warp, title, of_block = _LATENT_ROWS, f"latents: {name[1]}", 2 * _LATENT_ROWS
        else:
            continue

        def per_row(*classes: str, path: Mapping[str, int] = path, of_warp: int = of_warp) -> float:
            return sum(path.get(key, 0) for key in classes) / of_warp

        rows.append(
            {
                **kernel,
                "name": title,
                "rows": of_block,
                "all": per_row("instructions"),
                "mma": per_row("hmma", "hgmma"),
                "lds": per_row("lds"),
                "copies": per_row("ldgsts", "ldg"),
                "alu": per_row("other", "convert", "float"),
                "local": kernel["loop"].get("local", 0),
            }
        )
    return sorted(rows, key=lambda row: (row["name"], row["rows"]))


_COLUMNS = tuple(
    column
    for shape in _SHAPES
    for column in ((f"{shape} (us)", f"{shape}.us", ".0f"), ("of copy", f"{shape}.share", ".0%"))
)

GPU_TABLES = {
    "gpu-attention": Table(
        "build/release/benchmarks/gpu_bench --formats bf16 fp8 int8 int4+exact=none nvfp4+exact=none "
        "k=int8,v=int4+exact=none kivi4 --shape 64x8192 1x131072 1000x512 --json docs/results/gpu-attention.json",
        _attention,
        (("cache", "name", ""), *_COLUMNS),
    ),
    "gpu-peers": Table(
        "python benchmarks/gpu_peers.py --json docs/results/gpu-peers.json", _peers, (("kernel", "name", ""), *_COLUMNS)
    ),
    "gpu-kernels": Table(
        "python benchmarks/gpu_kernels.py --json docs/results/gpu-kernels.json",
        _kernels,
        (
            ("K, V", "name", ""),
            ("query rows", "rows", "d"),
            ("registers", "registers", "d"),
            ("spills (bytes)", "spill_bytes", "d"),
            ("local accesses", "local", "d"),
            ("instructions", "all", ".0f"),
            ("HMMA, HGMMA", "mma", ".1f"),
            ("LDS", "lds", ".1f"),
            ("LDG, LDGSTS", "copies", ".1f"),
            ("ALU and conversions", "alu", ".0f"),
        ),
    ),
    "gpu-engine": Table(
        "build/release/benchmarks/gpu_engine_bench benchmarks/smollm2-135m.json --formats bf16 int4 --weights bf16 "
        "--json docs/results/gpu-engine.json",
        _engine,
        (
            ("cache", "format", ""),
            ("sequences", "batch", "d"),
            ("step (ms)", "decode_step_ms", ".2f"),
            ("tokens/s", "decode_tokens_per_second", ".0f"),
            ("eager (ms)", "eager_step_ms", ".2f"),
            ("mean KL to the CPU", "kl_mean", ".1e"),
            ("start (s)", "start_seconds", ".2f"),
        ),
    ),
}
