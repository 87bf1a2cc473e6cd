"""--role: a prompt's pages go from an engine that computes them to one that generates, through a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import live_server
from redis_process import RedisProcess, running_redis

from kvanta import LLM, InputError, SamplingParams

OPTIONS: dict[str, Any] = {
    "kv_cache_dtype": "int8",
    "max_model_len": 512,
    "block_size": 16,
    "threads": 1,
    "kv_cache_memory_bytes": "1MiB",
}
BODY = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True, "return_token_ids": True}
PROMPT_TOKENS = 480


def prompt(stem: int) -> list[int]:
    return [3 + (stem * 7 + i * i) % 400 for i in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with running_redis(tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture(scope="module")
def alone() -> LLM:
    return LLM("stories260k", **OPTIONS)


def wanted(alone: LLM, tokens: list[int]) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
    [output] = alone.generate([{"prompt_token_ids": tokens}], params)
    return list(output.outputs[0].token_ids)


def test_a_prompt_is_stored_when_its_first_token_comes(redis: RedisProcess, alone: LLM) -> None:
    """Without a flush, and of several prompts at once."""
    url = f"redis://127.0.0.1:{redis.port}/1"
    params = SamplingParams(max_tokens=12, min_tokens=3, temperature=0.9, seed=5, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": prompt(stem)} for stem in (1, 2)]
    first = LLM("stories260k", **OPTIONS, kv_store=url, role="prefill")
    outputs = first.generate(prompts, params)
    assert [len(each.outputs[0].token_ids) for each in outputs] == [1, 1]
    second = LLM("stories260k", **OPTIONS, kv_store=url, role="decode")
    for stem in (1, 2):
        tokens = prompt(stem)
        [output] = second.generate([{"prompt_token_ids": tokens}], params)
        assert list(output.outputs[0].token_ids) == wanted(alone, tokens)
        assert (output.num_cached_tokens or 0) >= 0.95 * PROMPT_TOKENS
    assert second.stats()["store"]["declined_tokens"] == 0


def test_two_servers_and_a_plain_client(redis: RedisProcess, alone: LLM) -> None:
    """The client sends one body to both; the first answers with one token."""
    url = f"redis://127.0.0.1:{redis.port}/2"
    options = {name: value for name, value in OPTIONS.items() if name != "kv_cache_dtype"}
    body = {**BODY, "model": "stories260k", "prompt": prompt(3)}
    common: dict[str, Any] = {"kv_cache_dtype": "int8"}
    with live_server(options={**options, "kv_store": url, "role": "prefill"}, **common) as prefill:
        assert len(prefill.completion(**body)["choices"][0]["token_ids"]) == 1
        with live_server(options={**options, "kv_store": url, "role": "decode"}, **common) as decode:
            answer = decode.completion(**body)
    assert answer["choices"][0]["token_ids"] == wanted(alone, prompt(3))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.95 * PROMPT_TOKENS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "prefill"}, "role = prefill: needs kv_store or kv_cache_dir"),
        ({"role": "decoder"}, "both, prefill, decode"),
        ({"role": "decode", "kv_store": "redis://h", "enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ],
)
def test_roles_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LLM("stories260k", **OPTIONS, **options)


def test_sglangs_name_of_the_option(redis: RedisProcess) -> None:
    url = f"redis://127.0.0.1:{redis.port}/4"
    llm = LLM("stories260k", **OPTIONS, kv_store=url, disaggregation_mode="prefill")
    assert llm.config.role == "prefill"
    assert LLM("stories260k", **OPTIONS, disaggregation_mode="null").config.role == "both"


def test_prefill_replicas_need_a_store() -> None:
    pytest.importorskip("ray")
    import kvanta.ray

    with pytest.raises(InputError, match="prefill_replicas = 2: needs kv_store"):
        kvanta.ray.app(model="stories260k", prefill_replicas=2)
