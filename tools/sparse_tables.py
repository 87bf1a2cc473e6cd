"""The tables of docs/results/*.json about sparse attention and compressed entries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from result_table import Rows, Table


def _parts(result: Mapping[str, Any], _: Path) -> Rows:
    chunk = result["chunk"]
    return [{**row, "work": "decode" if row["work"] == "decode" else f"prompt of {chunk}"} for row in result["rows"]]


def _layers(result: Mapping[str, Any], _: Path) -> Rows:
    return [{**row, "select_ms": row["select_ms"] or None} for row in result["layers"]]


SPARSE_TABLES = {
    "sparse-attention": Table(
        "build/release/benchmarks/sparse_attention_bench --threads 1 --contexts 32768 131072 "
        "--json docs/results/sparse-attention.json",
        _layers,
        (
            ("layer", "layer", ""),
            ("context", "context", ",d"),
            ("selection (ms)", "select_ms", ".2f"),
            ("of the arithmetic", "select_share", ".0%"),
            ("attention (ms)", "attend_ms", ".2f"),
            ("of the arithmetic", "attend_share", ".0%"),
            ("both, of dense", "of_first", ".4f"),
        ),
    ),
    "deepseek-v4-layers": Table(
        "python benchmarks/deepseek_v4_layers.py --json docs/results/deepseek-v4-layers.json",
        _parts,
        (
            ("layer", "layer", ""),
            ("work", "work", ""),
            ("context", "context", ",d"),
            ("ms", "ms", ",.1f"),
            ("of memory", "of_memory", ".0%"),
            ("experts", "shares.experts", ".1%"),
            ("projections", "shares.projections", ".1%"),
            ("selection", "shares.selection", ".1%"),
            ("attention", "shares.attention", ".1%"),
            ("entries", "shares.entries", ".1%"),
            ("streams", "shares.streams", ".1%"),
        ),
    ),
}
