"""Time to the first token of a long prompt, cold and with its pages on disk after a restart, per cache format.

    python benchmarks/prefix_cache.py smollm2 --json docs/results/prefix-cache.json

Cold: a new engine computes the prompt and writes its pages. Warm: another new engine finds them in the folder. Both
have run a short prompt before, so that weights are in memory. Files may be in the system's file cache, as
after a restart of the server alone; --drop-caches empties it before warm runs (needs root). The tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from kvanta import _core
from kvanta.engine_options import engine_config
from kvanta.models import resolve_model

FORMATS = ("bf16", "fp8", "int8", "int4")
OUTPUT_TOKENS = 16


def run(engine: _core.Engine, name: str, prompt: list[int], output_tokens: int) -> tuple[list[int], float, int]:
    """New tokens, seconds to the first one, and cached prompt tokens."""
    sampling = _core.SamplingParams()
    sampling.max_tokens, sampling.ignore_eos, sampling.temperature = output_tokens, True, 0.0
    tokens: list[int] = []
    first, cached = 0.0, 0
    begin = time.monotonic()
    engine.add(name, prompt, sampling)
    while (outputs := engine.step()) is not None:
        for each in outputs:
            if each.error:
                raise SystemExit(f"error: {each.error}")
            if not tokens:
                first, cached = time.monotonic() - begin, each.cached_tokens
            tokens.extend(each.tokens)
    return tokens, first, cached


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def measure(options: argparse.Namespace, name: str, model: str, prompt: list[int]) -> dict[str, Any]:
    """One row of the report."""
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        arguments = {
            "kv_cache_dtype": name,
            "max_model_len": len(prompt) + OUTPUT_TOKENS + 1,
            "max_num_seqs": 1,
            "kv_cache_dir": folder,
            "threads": options.threads,
        }
        seconds: dict[str, list[float]] = {"cold": [], "warm": []}
        wanted: list[int] = []
        disk: dict[str, Any] = {}
        for what in ("cold", *["warm"] * options.repeats):
            if what == "warm" and options.drop_caches:
                drop_caches()
            engine = _core.Engine(engine_config(model, arguments))
            run(engine, "short", prompt[-40:], 1)
            tokens, first, cached = run(engine, what, prompt, OUTPUT_TOKENS)
            wanted = wanted or tokens
            if tokens != wanted:
                raise SystemExit(f"error: {name}: tokens after a hit are not those of the cold run")
            if what == "warm" and cached < len(prompt) - 128:
                raise SystemExit(f"error: {name}: {cached} of {len(prompt)} tokens were found")
            seconds[what].append(first)
            engine.flush_prefix_cache()
            disk = engine.stats()["disk"]
            del engine
    cold, warm = min(seconds["cold"]), float(np.median(seconds["warm"]))
    row = {
        "format": name,
        "stored_mib": disk["bytes"] / 2**20,
        "cold_s": cold,
        "warm_s": warm,
        "times": cold / warm,
        "read_gb_s": disk["read_bytes"] / disk["read_seconds"] / 1e9,
    }
    print(f"{name:18} cold {cold:.3f} s, warm {warm:.3f} s: {row['times']:.1f} times", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=7680)
    parser.add_argument("--repeats", type=int, default=3, help="warm runs, of which the median counts")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dir", help="folder for the files (default: the system's for temporary files)")
    parser.add_argument("--drop-caches", action="store_true", help="read from the disk itself")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    model = str(resolve_model(options.model).path)
    vocab = _core.read_model_info(model).vocab
    random = np.random.default_rng(3)
    prompt = [int(token) for token in random.integers(0, vocab, size=options.prompt_tokens)]
    report = {
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "rows": [measure(options, name, model, prompt) for name in options.formats],
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
