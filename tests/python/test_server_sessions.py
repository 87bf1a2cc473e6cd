"""Conversations on quantized caches: each turn finds its history in the prefix cache, and answers as without one."""

from __future__ import annotations

import random
import threading

import pytest
from live_server import live_server
from prometheus_client.parser import text_string_to_metric_families

from kvanta import LLM, SamplingParams


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8", "k=int8,v=int4_per_token_head", "int4_per_token_head"])
def test_turns_answer_as_from_a_cold_cache(dtype: str) -> None:
    generator = random.Random(11)
    cold = LLM(
        "stories260k", kv_cache_dtype=dtype, enable_prefix_caching=False, threads=1, kv_cache_memory_bytes="8MiB"
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    histories = [[1], [1]]
    cached = 0
    with live_server(kv_cache_dtype=dtype) as server:
        for _ in range(4):
            for history in histories:  # two conversations by turns
                history.extend(generator.choices(range(3, 512), k=generator.randrange(10, 60)))
                body = {"prompt": history, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
                answer = server.completion(**body, return_token_ids=True)
                expected = cold.generate([history], greedy)[0].outputs[0]
                assert answer["choices"][0]["token_ids"] == expected.token_ids
                assert answer["choices"][0]["text"] == expected.text
                cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                history.extend(expected.token_ids)
    assert cached >= 2 * (64 + 128)


def test_quality_is_sampled_while_the_server_is_idle() -> None:
    with live_server(kv_cache_dtype="int4_per_token_head", quality_sample_rate=1.0) as server:
        server.completion(prompt=[1, *range(10, 110)], temperature=0, max_tokens=20, ignore_eos=True)
        patience = threading.Event()
        for _ in range(600):
            text = server.client.get("/metrics").text
            if 'sampled_requests_total{model_name="stories260k"} 1.0' in text:
                break
            patience.wait(0.05)
        families = text_string_to_metric_families(text)
        seen = {sample.name.removeprefix("kvanta:"): sample.value for family in families for sample in family.samples}
    assert seen["sampled_kl_divergence_nats_count"] == 20
    assert 0 < seen["sampled_kl_divergence_nats_sum"] <= 20 * seen["sampled_kl_divergence_max_nats"]
    assert seen["kv_blocks_total"] >= seen["kv_zero_blocks_total"] >= 0
