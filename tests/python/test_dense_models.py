"""Architectures without experts: scale files, calibration and evaluation know them, and generation with a cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from kvanta import LLM, SamplingParams
from kvanta.calibration import calibrate, write_scale_file
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.evaluate import Settings, evaluate

TOKENS = np.random.default_rng(11).integers(3, 512, 150)
OPTIONS: dict[str, Any] = {"max_model_len": 192, "kv_cache_memory_bytes": "8MiB", "threads": 1}


@pytest.fixture(scope="module", params=tiny_models.DENSE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of stories260k, and heads that every format takes."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_models.make_model(request.param, vocab_size=512, hidden_size=128, head_dim=32)
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


def test_scales_of_a_file_reach_the_cache(folder: Path, tmp_path: Path) -> None:
    reader = LLM(folder, kv_cache_dtype="bf16", **OPTIONS)
    found = calibrate(reader, TOKENS, granularity="head")
    write_scale_file(tmp_path / "scales.json", found, reader.model_info)
    llm = LLM(folder, kv_cache_dtype="fp8", quantization_param_path=str(tmp_path / "scales.json"), **OPTIONS)
    exact, logits = reader.logits(TOKENS), llm.logits(TOKENS)
    for layer, stats in enumerate(llm.stats()["layers"]):
        np.testing.assert_array_equal(stats["k_scale"], found.k_scale[layer])
        np.testing.assert_array_equal(stats["v_scale"], found.v_scale[layer])
    error = np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2))
    assert 0 < error < 0.5, "sharp attention multiplies the rounding of keys"


def test_evaluation(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    settings = Settings(formats=["int8", "fp8"], context=128, tokens=256, engine={"threads": 1})
    rows = evaluate(str(folder), settings)["formats"]
    assert 0 < rows["int8"]["kl_mean"] < rows["fp8"]["kl_mean"]


def test_chunks_batches_and_hits_keep_the_bits(folder: Path) -> None:
    whole = LLM(folder, kv_cache_dtype="int4", max_num_batched_tokens=192, **OPTIONS)
    chunked = LLM(folder, kv_cache_dtype="int4", max_num_batched_tokens=64, **OPTIONS)
    np.testing.assert_array_equal(chunked.logits(TOKENS), whole.logits(TOKENS))
    prompts = [[int(token) for token in TOKENS[:count]] for count in (150, 70, 33, 1)]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=4, ignore_eos=True)
    alone = [whole.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    for _ in range(2):  # the second time with hits
        for output, expected in zip(chunked.generate(prompts, params), alone, strict=True):
            assert output.outputs[0].token_ids == expected.token_ids
            assert output.outputs[0].logprobs == expected.logprobs


def test_decode_continues_as_a_prompt_of_the_same_tokens(folder: Path) -> None:
    """Rows of one token, from the cache: the bits are those of one long prompt."""
    llm = LLM(folder, kv_cache_dtype="int8", **OPTIONS)
    prompt = [int(token) for token in TOKENS[:100]]
    greedy = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    output = llm.generate([prompt], greedy)[0].outputs[0].token_ids
    logits = llm.logits(np.array(prompt + list(output)))
    assert logits.argmax(axis=-1)[len(prompt) - 1 : -1].tolist() == list(output)
