"""Precision by age: every way to a token has the bits of a cold run; sizes, accuracy, options and what is refused."""

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

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"sliding_window": 150},  # every other layer
    "DeepseekV2": {},  # MLA
    "Qwen3_5": {},  # recurrent layers
}
MAPS = {
    "Llama": ["0=int8,128=t3", "0=int8,64=int4,192=t2", "0=int4,128=t2+sink=0", "0=int4+exact=2,256=int2_g32"],
    "Gemma2": ["0=int8,64=t3", "0=int4,64=t3,192=t2"],
    "DeepseekV2": ["0=mla_fp8,128=mla_int4", "0=bf16,64=mla_fp8,192=int4"],
    "Qwen3_5": ["0=int8,128=t3"],
}


def make_folder(model: str, folder: Path) -> Path:
    """A random model with the tokenizer of stories260k."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim" or model != "DeepseekV2"}
    tiny_models.save(tiny_models.make_model(model, **{**sizes, **MODELS[model]}), folder, torch.bfloat16)
    return add_tokenizer(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {model: make_folder(model, tmp_path_factory.mktemp(model)) for model in MODELS}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("model", MODELS)
def test_every_way_to_a_token_has_the_bits_of_a_cold_run(
    folders: dict[str, Path], model: str, seed: int, tmp_path: Path
) -> None:
    choice = random.Random(f"{model} {seed}")
    cache: dict[str, Any] = {
        "kv_cache_ages": choice.choice(MAPS[model]),
        "block_size": choice.choice([16, 32, 64]),
        "max_model_len": 2048,
        "threads": choice.choice([1, 2]),
    }
    compare_with_cold_runs(folders[model], cache, ["2MiB", "4MiB", "64MiB"], choice, tmp_path)


def test_hits_read_aged_pages(folders: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "kv_cache_ages": "0=int8,128=t3",
        "kv_cache_memory_bytes": "64MiB",
        "max_model_len": 2048,
        "kv_cache_dir": str(tmp_path),
    }
    prompt = np.random.default_rng(1).integers(3, VOCABULARY, 700).tolist()

    def cached_tokens(lengths: tuple[int, ...]) -> list[int | None]:
        llm = LLM(folders["Llama"], **options)
        prompts = [[*prompt[:length], 5] for length in lengths]
        return [llm.generate([each], SamplingParams(max_tokens=1))[0].num_cached_tokens for each in prompts]

    assert cached_tokens((700, 700, 400, 150)) == [0, 640, 384, 128]
    assert cached_tokens((700, 400, 150)) == [640, 384, 128], "from the folder, after a restart"


def test_queries_read_the_first_level_up_to_the_age(folders: dict[str, Path]) -> None:
    tokens = np.random.default_rng(2).integers(3, VOCABULARY, 600).astype(np.int32)
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 1024}
    aged = LLM(folders["Llama"], kv_cache_ages="0=int8,256=t2+sink=0", **options).logits(tokens)
    first = LLM(folders["Llama"], kv_cache_dtype="int8", **options).logits(tokens)
    np.testing.assert_array_equal(aged[:256], first[:256])
    assert np.all(np.any(aged[256:] != first[256:], axis=1)), "the first page has aged"
    in_chunks = LLM(
        folders["Llama"], kv_cache_ages="0=int8,256=t2+sink=0", max_num_batched_tokens=64, max_model_len=1024
    )
    np.testing.assert_array_equal(in_chunks.logits(tokens), aged)


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_age_alike(folders: dict[str, Path], option: str) -> None:
    tokens = np.random.default_rng(3).integers(3, VOCABULARY, 500).astype(np.int32)
    options: dict[str, Any] = {"kv_cache_ages": "0=int8,64=int4,192=t3", "max_model_len": 1024, "threads": 1}
    expected = LLM(folders["Llama"], **options).logits(tokens)
    np.testing.assert_array_equal(LLM(folders["Llama"], **{**options, option: 2}).logits(tokens), expected)


def test_sizes_are_those_of_the_context(folders: dict[str, Path]) -> None:
    folder = str(folders["Llama"])
    bits = {
        name: plan(folder, 1 << 30, [name], 2048)["formats"][0]["bits_per_element"]
        for name in ("int8", "t3", "0=int8,128=t3+sink=0")
    }
    assert bits["0=int8,128=t3+sink=0"] == pytest.approx((bits["int8"] * 128 + bits["t3"] * 1920) / 2048)
    (row,) = plan(folder, 1 << 30, ["0=int8,128=t3"], 2048)["formats"]
    assert row["tokens"] // 2048 == row["sequences"]
    llm = LLM(folder, kv_cache_ages="0=int8,128=t3", max_model_len=2048, enable_prefix_caching=False)
    stats = llm.stats()
    assert stats["kv_cache_dtype"] == "0=int8,128=t3"
    assert stats["bytes_per_token"] == pytest.approx(row["bytes_per_token"])
    (group,) = stats["groups"]
    assert [level["scheme"] for level in stats["layers"][0]["levels"]] == ["int8", "t3"]
    assert group["level_page_bytes"] == [sum(layer["levels"][1]["page_bytes"] for layer in stats["layers"])]
    held = [llm.stats()["groups"][0] for _ in llm.stream([5] * 1500, SamplingParams(max_tokens=3, ignore_eos=True))]
    assert held[0]["level_pages_used"] == [1500 // 64 - 2]
    assert held[0]["pages_used"] == 3, "the first page, the open one and the one before it"


def test_accuracy_is_between_those_of_its_levels(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    settings = Settings(formats=["int8", "0=int8,64=t2", "t2"], context=512, tokens=1024, engine={"threads": 1})
    rows = evaluate(str(folders["Llama"]), settings)["formats"]
    near, aged, far = (rows[name]["kl_mean"] for name in ("int8", "0=int8,64=t2", "t2"))
    assert near < aged < far


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_ages": "0=int8,100=t3"}, "the age of 100 tokens must be a multiple of the page size, 64"),
        ({"kv_cache_ages": "0=int8,0=t3"}, "the age 0 must be above 0"),
        ({"kv_cache_ages": "64=int8,128=t3"}, "the first age is 64, must be 0"),
        ({"kv_cache_ages": "0=int8"}, "there is no age after 0"),
        ({"kv_cache_ages": "int8"}, "must be like 0=int8,8192=int4"),
        ({"kv_cache_ages": "0=int8,64=int4,128=t3,256=t2"}, "at most 3 levels"),
        ({"kv_cache_ages": "0=int4,64=int8"}, "no fewer than the"),
        ({"kv_cache_ages": "0=t3,64=t2"}, "must not be a trellis"),
        ({"kv_cache_ages": "0=fp8,64=int4"}, "Hadamard"),
        ({"kv_cache_ages": "0=int4+query,64=t3"}, "+query"),
        ({"kv_cache_ages": "0=int8,64=int4+mean"}, "+mean"),
        ({"kv_cache_ages": "0=bf16,64=nvfp4"}, "nvfp4 has static scales"),
        ({"kv_cache_ages": "0=int8,64=int9"}, "int9"),
        ({"kv_cache_ages": "0=int8,64=t3", "kv_cache_dtype": "int4"}, "give one of them"),
        ({"kv_cache_ages": "0=int8,64=t3", "max_total_tokens": 4096}, "give kv_cache_memory_bytes"),
    ],
)
def test_what_cannot_be_is_named(folders: dict[str, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("+", r"\+")):
        LLM(folders["Llama"], max_model_len=1024, **options)
