"""Batches with weights of 16, 8 and 4 bits: tokens per second of the same requests, engines in turns.

    python benchmarks/weight_batches.py --json docs/results/weight-batches.json

Random weights in the shape of a Llama model of 1.2 billion, quantized when they are loaded; MODEL, a folder with bf16
weights, is another one. --requests arrive at once, each with --input-len different tokens, and get --output-len; the
cache is bf16. Every engine generates the same tokens in every repeat, or nothing is printed. Ratios to the first of
--weights are medians of those of each repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_model import LLAMA_1B, write_random_model

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.cli.machine import cpu_name
from kvanta.engine.config import engine_config


class WeightEngine:
    """The engine of a weight format."""

    def __init__(self, folder: Path, weights: str, options: argparse.Namespace) -> None:
        length = options.input_len + options.output_len
        arguments = {"weight_dtype": weights, "max_num_seqs": options.requests, "max_model_len": length}
        arguments |= {"threads": options.threads, "enable_prefix_caching": False}
        self._engine = _core.Engine(engine_config(str(folder), arguments))
        self._expected: dict[str, list[int]] = {}

    def tokens_per_second(self, options: argparse.Namespace) -> tuple[float, float]:
        """Prompt tokens until every request has its first token, and new ones over the whole run. Raises SystemExit."""
        random = np.random.default_rng(16)
        generated: dict[str, list[int]] = {f"{number}": [] for number in range(options.requests)}
        for name in generated:
            sampling = _core.SamplingParams()
            sampling.max_tokens, sampling.ignore_eos, sampling.temperature = options.output_len, True, 0.0
            prompt = random.integers(1, self._engine.info.vocab, size=options.input_len)
            self._engine.add(name, [int(token) for token in prompt], sampling)
        begin = first = last = time.perf_counter()
        while (outputs := self._engine.step()) is not None:
            last = time.perf_counter()
            waited = any(not tokens for tokens in generated.values())
            for each in outputs:
                if each.error:
                    raise SystemExit(f"error: {each.error}")
                generated[each.id] += each.tokens
            first = last if waited else first
        self._expected = self._expected or generated
        if generated != self._expected or any(len(tokens) != options.output_len for tokens in generated.values()):
            raise SystemExit("error: a repeat generated other tokens; no figure is worth printing")
        return (
            options.requests * options.input_len / (first - begin),
            options.requests * options.output_len / (last - begin),
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.model:
            folder = resolve_model(options.model).path
        else:
            folder = write_random_model(Path(scratch) / "model", LLAMA_1B)
        engines = {weights: WeightEngine(folder, weights, options) for weights in options.weights}
        runs = [
            {weights: engine.tokens_per_second(options) for weights, engine in engines.items()}
            for _ in range(options.repeats)
        ]
    rows: list[dict[str, Any]] = []
    for weights in options.weights:
        row: dict[str, Any] = {"weights": weights}
        for part, name in enumerate(("prompt_tokens_s", "new_tokens_s")):
            row[name] = median(run[weights][part] for run in runs)
            row[f"{name}_ratio"] = median(run[weights][part] / run[options.weights[0]][part] for run in runs)
        rows.append(row)
        print(json.dumps(row), flush=True)
    load = {key: getattr(options, key) for key in ("requests", "input_len", "output_len", "repeats", "threads")}
    if options.json:
        options.json.write_text(
            json.dumps({"cpu": cpu_name(), **load, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
