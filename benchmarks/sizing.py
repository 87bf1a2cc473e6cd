#!/usr/bin/env python3
"""Users and context that fit on machines of common sizes: `kvanta plan` for several models, weights and cache formats.

    python benchmarks/sizing.py --json docs/results/sizing.json

An eighth of the memory, and at least 2 GiB, is left to the system. A row is left out if not one user of CONTEXT tokens
fits. The figures depend on no measurement: they are those of the engine's own layout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvanta.errors import ResourceError
from kvanta.fleet.plan import plan

GIB = 2**30
MACHINES = (8, 16, 32, 64)  # GiB
MODELS = ("smollm3-3b", "qwen3-8b", "phi-4", "qwen3-30b-a3b", "qwen3-32b")
WEIGHTS = ("bf16", "int8", "int4")
FORMATS = ("bf16", "int8", "int4")
CONTEXT = 8192


def rows() -> list[dict[str, Any]]:
    """One row for each machine, model and weight type that fits; of a model's weight types the largest and int4."""
    found = []
    for gib in MACHINES:
        memory = gib * GIB - max(2 * GIB, gib * GIB // 8)
        for model in MODELS:
            fitting = [row for weights in WEIGHTS if (row := _row(gib, memory, model, weights)) is not None]
            found += fitting[:1] if len(fitting) < 2 else [fitting[0], fitting[-1]]
    return found


def _row(gib: int, memory: int, model: str, weights: str) -> dict[str, Any] | None:
    try:
        report = plan(model, memory, FORMATS, CONTEXT, {"weight_dtype": weights})
    except ResourceError:  # the weights alone do not fit
        return None
    users = {row["name"]: row["sequences"] for row in report["formats"]}
    if not users["int4"]:
        return None
    return {
        "memory_gib": gib,
        "model": model,
        "weights": weights,
        "weights_gib": report["weight_bytes"] / GIB,
        "cache_gib": report["cache_bytes"] / GIB,
        "users": users,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of the figures")
    file = parser.parse_args().json
    file.write_text(json.dumps({"context": CONTEXT, "rows": rows()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
