"""Quality telemetry from Python: the figures are those that `logits` of both caches give."""

from typing import Any

import numpy as np
import pytest

from kvanta import LLM, InputError, SamplingParams
from kvanta.evaluate.divergence import kl_divergence

PROMPTS = ["Once upon a time", "Lily and the dog"]


def test_the_divergence_is_that_of_the_logits() -> None:
    llm = LLM(
        "stories260k",
        kv_cache_dtype="int4_per_token_head",
        kv_cache_memory_bytes="16MiB",
        threads=2,
        quality_sample_rate=1.0,
    )
    exact = LLM("stories260k", kv_cache_memory_bytes="16MiB", threads=2)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=90, seed=1))
    assert llm.stats()["quality"]["pending"] == 2
    rows = []
    for output in outputs:
        prompt, tokens = len(output.prompt_token_ids), output.prompt_token_ids + output.outputs[0].token_ids
        served, reference = llm.logits(tokens), exact.logits(tokens)
        rows.append(kl_divergence(reference, served)[prompt - 1 : -1])
    expected = np.concatenate(rows)
    quality = llm.measure_quality()
    assert quality["requests"] == 2
    assert quality["tokens"] == len(expected)
    assert quality["pending"] == quality["skipped"] == 0
    # Weights of relative error 3e-7 times differences of logits below 1.
    assert quality["kl_mean"] == pytest.approx(expected.mean(), abs=1e-6)
    assert quality["kl_max"] == pytest.approx(expected.max(), abs=1e-6)
    assert quality["kl_mean"] > 1e-5


def test_off_by_default_and_checked() -> None:
    llm = LLM("stories260k", kv_cache_dtype="int4_per_token_head", kv_cache_memory_bytes="8MiB", threads=1)
    llm.generate("a", SamplingParams(max_tokens=3))
    much: Any = "much"
    assert llm.measure_quality()["requests"] == 0
    with pytest.raises(InputError, match=r"quality_sample_rate = 2: must be between 0 and 1"):
        LLM("stories260k", quality_sample_rate=2)
    with pytest.raises(InputError, match="quality_sample_rate"):
        LLM("stories260k", quality_sample_rate=much)
