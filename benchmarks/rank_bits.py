"""Bits of many requests by ranks of tensor parallelism, experts and pipelines, next to one process.

    python benchmarks/rank_bits.py FOLDER --model "Qwen3 MoE" --json docs/results/rank-bits.json

Makes a random model in FOLDER (tests/python/tiny_models.py, with transformers), serves the same random prompts by each
number of ranks, sampled and with log-probabilities, and counts the requests whose tokens or log-probabilities differ.
The file keeps the rows of other models.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "python"))
import tiny_models
from divided_models import saved

from kvanta import LLM, SamplingParams

MODELS = {
    "Llama": ("Llama", {"kv_cache_dtype": "int4"}),
    "Qwen3 MoE": ("Qwen3Moe", {"kv_cache_dtype": "int4"}),
}
RANKS: dict[str, dict[str, Any]] = {
    "1": {},
    "TP 2": {"tensor_parallel_size": 2},
    "TP 4": {"tensor_parallel_size": 4},
    "TP 4, by experts": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    "PP 2": {"pipeline_parallel_size": 2},
    "PP 4": {"pipeline_parallel_size": 4},
}


def answers(model: Path, prompts: int, options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Tokens and log-probabilities of each request."""
    llm = LLM(model, tokenizer="stories260k", max_model_len=160, block_size=32, threads=1, max_num_seqs=64, **options)
    random = np.random.default_rng(7)
    requests = [
        {"prompt_token_ids": random.integers(3, tiny_models.VOCAB, random.integers(1, 64)).tolist()}
        for _ in range(prompts)
    ]
    params = [
        SamplingParams(max_tokens=12, temperature=1.0, seed=seed, logprobs=1, ignore_eos=True)
        for seed in range(prompts)
    ]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=MODELS, default="Llama")
    parser.add_argument("--prompts", type=int, default=1000, metavar="N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    architecture, arguments = MODELS[options.model]
    folder = saved(architecture, options.folder / architecture, num_hidden_layers=4)
    rows = []
    expected: list[tuple[Any, Any]] = []
    for ranks, division in RANKS.items():
        if options.model == "Llama" and "enable_expert_parallel" in division:
            continue
        found = answers(folder, options.prompts, {**arguments, **division})
        expected = expected or found
        different = sum(one != other for one, other in zip(found, expected, strict=True))
        rows.append({"model": options.model, "ranks": ranks, "prompts": len(found), "different": different})
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        before = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
        kept = [row for row in before if row["model"] != options.model]
        options.json.write_text(json.dumps({"rows": kept + rows}, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["different"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
