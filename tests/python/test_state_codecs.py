"""States of recurrent layers rounded at a grid: every way to a token has the bits of a cold run, sizes, accuracy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from cold_runs import VOCABULARY, add_tokenizer, compare_with_cold_runs

from kvanta import LLM, SamplingParams
from kvanta.errors import InputError
from kvanta.evaluate import Settings, evaluate
from kvanta.fleet.plan import plan


def make_folder(folder: Path) -> Path:
    """A random Qwen3.5 with the tokenizer of stories260k, and heads that every format takes."""
    settings = {"vocab_size": VOCABULARY, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    tiny_models.save(tiny_models.make_model("Qwen3_5", **settings), folder, torch.bfloat16)
    return add_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize("seed", range(12))
def test_every_way_to_a_token_has_the_bits_of_a_cold_run(folder: Path, seed: int, tmp_path: Path) -> None:
    choice = random.Random(seed)
    cache: dict[str, Any] = {
        "kv_cache_dtype": choice.choice(["bf16", "int8", "int4", "kivi4", "int4+exact=2", "nvfp4"]),
        "state_cache_dtype": choice.choice(["bfloat16", "int8", "int4"]),
        "state_grid": choice.choice([64, 128, 192]),
        "max_model_len": 2048,
        "threads": choice.choice([1, 2]),
    }
    compare_with_cold_runs(folder, cache, ["900KiB", "2MiB", "64MiB"], choice, tmp_path)


def test_hits_end_at_the_grid(folder: Path) -> None:
    options: dict[str, Any] = {"state_cache_dtype": "int8", "state_grid": 128, "max_model_len": 2048}
    llm = LLM(folder, **options, kv_cache_memory_bytes="64MiB")
    prompt = np.random.default_rng(1).integers(3, VOCABULARY, 700).tolist()
    params = SamplingParams(max_tokens=1)
    llm.generate([prompt], params)
    (again,) = llm.generate([[*prompt, 5]], params)
    assert again.num_cached_tokens == 640
    (shorter,) = llm.generate([[*prompt[:600], 5]], params)
    assert shorter.num_cached_tokens == 512, "the interval of eight pages keeps a snapshot"


def test_chunks_give_the_logits_of_one_pass(folder: Path) -> None:
    tokens = np.random.default_rng(2).integers(3, VOCABULARY, 500).astype(np.int32)
    options: dict[str, Any] = {"state_cache_dtype": "int8", "state_grid": 64, "max_model_len": 2048}
    whole = LLM(folder, **options, max_num_batched_tokens=512).logits(tokens)
    np.testing.assert_array_equal(LLM(folder, **options, max_num_batched_tokens=64).logits(tokens), whole)
    exact = LLM(folder, max_model_len=2048).logits(tokens)
    np.testing.assert_array_equal(whole[:64], exact[:64])
    assert np.any(whole[64:] != exact[64:]), "states are rounded"


def test_snapshots_take_a_quarter(folder: Path) -> None:
    sizes = {}
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        (group,) = [
            group
            for group in LLM(folder, state_cache_dtype=dtype, max_model_len=512).stats()["groups"]
            if group["visibility"] == "recurrent"
        ]
        sizes[dtype] = group["page_bytes"]
    assert sizes["float32"] / sizes["bfloat16"] == pytest.approx(2, rel=0.02)
    assert sizes["float32"] / sizes["int8"] > 3.4, "heads of 16 have a scale for 16 codes; of 128: 3.9"
    assert sizes["int4"] < sizes["int8"]
    planned = plan(str(folder), 1 << 26, ["int4"], 1024, {"state_cache_dtype": "int8"})
    assert planned["formats"]


def test_accuracy_is_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    divergence = {}
    for dtype in ("float32", "int8", "int4"):
        engine = {"threads": 1, "state_cache_dtype": dtype, "state_grid": 64}
        settings = Settings(formats=["bf16"], context=512, tokens=1024, engine=engine)
        divergence[dtype] = evaluate(str(folder), settings)["formats"]["bf16"]["kl_mean"]
    # The reference's states are never rounded, its cache is fp32. 4 bits have steps 18 times as wide.
    assert 100 * divergence["float32"] < divergence["int8"] < divergence["int4"] / 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_cache_dtype": "int5"}, "'int5': expected one of float32, bfloat16, int8, int4"),
        ({"state_grid": 100}, "state_grid = 100: must be a multiple of the page size, 64"),
        ({"state_grid": 0}, "state_grid"),
    ],
)
def test_bad_options_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LLM(folder, **options)


def test_the_names_of_other_engines(folder: Path) -> None:
    assert LLM(folder, mamba_ssm_cache_dtype="int8").config.state_cache_dtype == "int8"
    assert LLM(folder, mamba_ssm_dtype="auto").config.state_cache_dtype == "float32"
