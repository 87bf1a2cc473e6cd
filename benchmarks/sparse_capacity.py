#!/usr/bin/env python3
"""Memory of the cache of models with sparse attention (DeepSeek V3.2, GLM-5, DeepSeek V4) for 1, 8 and 64 users at
128K, by format.

    python benchmarks/sparse_capacity.py --json docs/results/sparse-capacity.json

The figures depend on no measurement: they are those of the engine's own layout (`kvanta plan`). Latents and the keys of
indexers may have different formats. Bytes per token are those of the whole context: of windows and states, a token of a
longer one has fewer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvanta.fleet.plan import plan

GIB = 2**30
MODELS = ("deepseek-v3.2", "glm-5", "deepseek-v4")
# Latents, keys of indexers.
FORMATS = (("bf16", "bf16"), ("fp8", "fp8"), ("int8", "int8"), ("nvfp4", "fp8"), ("int4", "fp8"), ("int4", "int4"))
USERS = (1, 8, 64)
CONTEXT = 131072


def row(model: str, latents: str, keys: str) -> dict[str, Any]:
    """Bytes of a token, and of the cache for each number of users."""
    report = plan(model, 4096 * GIB, [latents], CONTEXT, {"indexer_cache_dtype": keys})
    (found,) = report["formats"]
    users = {str(count): count * found["sequence_bytes"] / GIB for count in USERS}
    return {
        "model": model,
        "latents": latents,
        "keys": keys,
        "bytes_per_token": found["sequence_bytes"] / CONTEXT,
        "users_gib": users,
    }


def rows() -> list[dict[str, Any]]:
    return [row(model, *formats) for model in MODELS for formats in FORMATS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file of the figures")
    file = parser.parse_args().json
    file.write_text(json.dumps({"context": CONTEXT, "rows": rows()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
