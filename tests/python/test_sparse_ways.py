"""Sparse attention and compressed entries: whatever way leads to a token, its bits are those of a cold run.

Random cases over models, formats of the cache and of the keys of indexers, chosen tokens, pages, chunks, batches,
preemption, restarts from disk, drafts, codes of states, and ranks of tensor parallelism. KVANTA_RANDOM_CASES=1000 runs
that many.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cold_runs import VOCABULARY, add_tokenizer, compare_with_cold_runs

CASES = int(os.environ.get("KVANTA_RANDOM_CASES", "9"))
FORMATS = ["bf16", "fp8", "int8", "int4", "nvfp4"]
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
LATENTS = {"kv_lora_rank": 128}
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV32": LATENTS,
    "GlmMoeDsa": LATENTS | {"indexer_types": ["full", "shared", "full"]},
    "DeepseekV4": {"head_dim": 128, "partial_rotary_factor": 0.25, "compress_rates": {SPARSE: 4, HEAVY: 128}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, changes in MODELS.items():
        settings = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048, **changes}
        made[name] = tmp_path_factory.mktemp(name)
        tiny_models.save(tiny_models.make_model(name, **settings), made[name], torch.bfloat16)
        add_tokenizer(made[name])
    return made


def random_case(choice: random.Random, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the cold run and of the one that is compared with it; options of the latter alone."""
    has_entries = name == "DeepseekV4"
    cache: dict[str, Any] = {
        "kv_cache_dtype": choice.choice(FORMATS),
        "indexer_cache_dtype": choice.choice(["auto", *FORMATS]),
        "max_model_len": 2048,
        "threads": choice.choice([1, 2]),
        "block_size": choice.choice([64, 128] if has_entries else [16, 32, 64, 128]),
    }
    code = choice.choice(["float32", "bfloat16", "int8"]) if has_entries else "float32"
    if code != "float32":
        cache |= {"state_cache_dtype": code, "state_grid": choice.choice([128, 256, 512])}
    running: dict[str, Any] = {}
    way = choice.choices(["alone", "ranks", "drafts"], weights=[5, 2, 2])[0]
    if way == "ranks":  # have no store
        running = {"tensor_parallel_size": 2, "kv_cache_dir": None}
        if has_entries and choice.random() < 0.7:
            running["decode_context_parallel_size"] = 2
    elif way == "drafts":
        running = {"speculative_config": {"method": "ngram", "num_speculative_tokens": choice.randrange(1, 5)}}
    if cache["block_size"] == 128:  # a step has a whole page
        running["max_num_batched_tokens"] = choice.choice([128, 300])
    return cache, running


@pytest.mark.parametrize("seed", range(CASES))
def test_every_way_to_a_token_has_the_bits_of_a_cold_run(folders: dict[str, Path], seed: int, tmp_path: Path) -> None:
    choice = random.Random(seed)
    name = list(MODELS)[seed % len(MODELS)]
    cache, running = random_case(choice, name)
    compare_with_cold_runs(folders[name], cache, ["8MiB", "16MiB", "64MiB"], choice, tmp_path, **running)
