"""--role: a prompt's pages go from an engine that computes them to one that generates, through a store."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import live_server
from redis_process import RedisProcess, running_redis
from server_process import KVANTA, descendants, free_port, server_process

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


def prefill_replicas(pid: int) -> list[int]:
    return [each for each in descendants(pid) if b"PrefillReplica" in Path(f"/proc/{each}/cmdline").read_bytes()]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_replicas_by_role(redis: RedisProcess, alone: LLM) -> None:
    """A prompt goes to a prefill replica first; after its death, prompts are computed where they are needed."""
    port = free_port()
    words = ["--block-size", "16", "--kv-cache-dtype", "int8", "--kv-cache-memory-bytes", "1MiB", "--threads", "1"]
    store = ["--kv-store", f"redis://127.0.0.1:{redis.port}/5", "--prefill-replicas", "1"]
    command = [*KVANTA, "stories260k", "--port", str(port), *words, *store]
    with server_process(command, port) as process, httpx2.Client(base_url=process.url, timeout=60) as client:

        def ask(stem: int) -> int:
            answer = client.post("/v1/completions", json={**BODY, "prompt": prompt(stem)}).json()
            assert answer["choices"][0]["token_ids"] == wanted(alone, prompt(stem))
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        # A prompt waits some seconds for a prefill replica to report, which a slow one may miss.
        assert any(ask(stem) >= 0.95 * PROMPT_TOKENS for stem in range(10, 30))
        assert ask(7) >= 0.95 * PROMPT_TOKENS
        [victim] = prefill_replicas(process.pid)
        os.kill(victim, signal.SIGKILL)
        ask(8)
        ask(9)


def test_prefill_replicas_need_a_store() -> None:
    pytest.importorskip("ray")
    import kvanta.ray

    with pytest.raises(InputError, match="prefill_replicas = 2: needs kv_store"):
        kvanta.ray.app(model="stories260k", prefill_replicas=2)
