"""Accuracy of codes of recurrent states: KL divergence from float32 states by the number of roundings before a token.

    python benchmarks/state_codes.py models/novels3m --text wiki.test.raw --json docs/results/state-codes.json

Every code rounds states at each multiple of the grid, which is as small as it can be: one page. Windows of --roundings
grids and one more from the start of the text, read teacher-forced with a bf16 cache; nats per token.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvanta
from kvanta import LLM
from kvanta.evaluate.divergence import kl_divergence, log_softmax

CODES = ("bfloat16", "int8", "int4")
PARTS = 4
"""Equal parts of the roundings, of each of which there is a mean."""


def divergences(llm: LLM, windows: list[list[int]], exact: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    """[windows][tokens]: KL(float32 states || those of `llm`), of logits `exact`."""
    return np.stack([kl_divergence(own, llm.logits(window)) for own, window in zip(exact, windows, strict=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="with recurrent layers")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--grid", type=int, default=64, metavar="N", help="tokens; also of a page [64]")
    parser.add_argument("--roundings", type=int, default=16, metavar="N")
    parser.add_argument("--windows", type=int, default=8, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    length = options.grid * (options.roundings + 1)
    common: dict[str, Any] = {"max_model_len": length, "block_size": options.grid, "kv_cache_dtype": "bf16"}
    plain = LLM(options.model, **common)
    text = options.text.read_text(encoding="utf-8")[: 16 * length * options.windows]
    tokens = plain.tokenizer.encode(text)[: length * options.windows]
    if len(tokens) < length * options.windows:
        parser.error(f"{options.text} has {len(tokens):,} tokens; {options.windows} windows of {length:,} are needed")
    windows = [tokens[begin : begin + length] for begin in range(0, len(tokens), length)]
    exact = [plain.logits(window) for window in windows]
    targets = [np.array(window[1:]) for window in windows]
    nll = -np.mean([log_softmax(rows[:-1])[np.arange(len(t)), t] for rows, t in zip(exact, targets, strict=True)])
    report: dict[str, Any] = {
        "model": options.model,
        "text": options.text.name,
        "grid": options.grid,
        "windows": options.windows,
        "perplexity": float(np.exp(nll)),
        "version": kvanta.__version__,
        "rows": [],
    }
    for code in CODES:
        llm = LLM(options.model, state_cache_dtype=code, state_grid=options.grid, **common)
        kl = divergences(llm, windows, exact)[:, options.grid :]  # nothing is rounded before
        parts = [float(part.mean()) for part in np.split(kl, PARTS, axis=1)]
        row = {"code": code, "kl_mean": float(kl.mean()), "kl_p99": float(np.quantile(kl, 0.99)), "kl_of_parts": parts}
        report["rows"].append(row)
        print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
