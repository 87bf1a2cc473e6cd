"""Recurrent layers: whatever way leads to a token, its bits are those of a cold run.

Random cases over kinds of layers, codes of states and grids, formats, chunks, batches, preemption, restarts from disk
and Redis, and pipelines of 2 and 4 ranks, which refuse stores. KVANTA_RANDOM_CASES=1000 runs that many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from cold_runs import VOCABULARY, add_tokenizer, compare_with_cold_runs
from redis_process import RedisProcess, running_redis

CASES = int(os.environ.get("KVANTA_RANDOM_CASES", "12"))
FORMATS = ["bf16", "int8", "int4", "kivi4", "int4+exact=2", "nvfp4"]
# Gated DeltaNet, Kimi Delta Attention next to latents, Mamba-2, and gated short convolutions. Every second layer is one
# of attention: each of four ranks has both kinds.
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "Qwen3_5": ({"head_dim": 32}, FORMATS),
    "KimiLinear": ({"moe_intermediate_size": 256}, ["bf16", "fp8", "int4"]),
    "BailingHybrid": ({"moe_intermediate_size": 256}, ["bf16", "fp8", "int4"]),
    "GraniteMoeHybrid": ({"shared_intermediate_size": 512}, FORMATS),
    "Lfm2": ({"layer_types": ["conv", "full_attention"] * 4}, FORMATS),
}
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "intermediate_size": 1024,  # more weights than the embeddings, which would count as layers of rank 0
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (changes, _) in MODELS.items():
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "max_position_embeddings": 2048}
        settings = {**sizes, **LAYERS, **changes}
        made[name] = tmp_path_factory.mktemp(name)
        tiny_models.save(tiny_models.make_model(name, **settings), made[name], torch.bfloat16)
        add_tokenizer(made[name])
    return made


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with running_redis(tmp_path_factory.mktemp("redis"), ("--maxmemory", "256mb")) as process:
        yield process


def random_case(choice: random.Random, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the cold run and of the one that is compared with it; options of the latter alone."""
    cache: dict[str, Any] = {
        "kv_cache_dtype": choice.choice(MODELS[name][1]),
        "max_model_len": 2048,
        "threads": choice.choice([1, 2]),
        "block_size": choice.choice([32, 64]),
    }
    ranks = choice.choices([1, 2, 4], weights=[6, 2, 1])[0]
    code = choice.choice(["float32", "bfloat16", "int8", "int4"])
    if code != "float32":
        cache |= {"state_cache_dtype": code, "state_grid": choice.choice([64, 128, 192, 512])}
    return cache, {} if ranks == 1 else {"pipeline_parallel_size": ranks, "kv_cache_dir": None}  # ranks have no store


@pytest.mark.parametrize("seed", range(CASES))
def test_every_way_to_a_token_has_the_bits_of_a_cold_run(
    folders: dict[str, Path], redis: RedisProcess, seed: int, tmp_path: Path
) -> None:
    choice = random.Random(seed)
    name = list(MODELS)[seed % len(MODELS)]
    cache, running = random_case(choice, name)
    if not running and choice.random() < 0.4:
        running["kv_store"] = f"redis://127.0.0.1:{redis.port}"
    compare_with_cold_runs(folders[name], cache, ["3MiB", "6MiB", "64MiB"], choice, tmp_path, **running)
