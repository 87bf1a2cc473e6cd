"""Choice of a replica, without Ray's cluster: by the pages that it holds and by its load."""

from __future__ import annotations

import importlib.util
import types
from typing import Any, cast

import pytest

from kvanta import LLM, SamplingParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

import asyncio

from kvanta import _core
from kvanta.ray import prompt_backlog
from kvanta.ray.messages import EngineRequest, fields_of, set_fields
from kvanta.ray.prefix_index import PrefixIndex, ReplicaPages, page_hashes
from kvanta.ray.prefix_router import PrefixRouter

PAGE = 16


def events_engine() -> _core.Engine:
    config = _core.EngineConfig()
    config.model = LLM("stories260k", kv_cache_memory_bytes="1MiB", max_model_len=64).config.model
    config.kv_cache_memory_bytes, config.page_size, config.threads, config.max_model_len = 400_000, PAGE, 1, 256
    config.kv_events_queue_size = 1000
    return _core.Engine(config)


def run(engine: _core.Engine, tokens: list[int], salt: str = "") -> int:
    """Cached tokens of a prompt."""
    params = _core.SamplingParams()
    params.max_tokens = 1
    engine.add("one", tokens, params, salt)
    cached = 0
    while (outputs := engine.step()) is not None:
        cached = max([cached, *(each.cached_tokens for each in outputs)])
    return cached


def test_the_index_foretells_hits() -> None:
    """With evictions and salts: what a router computes of tokens is what the engine finds."""
    engine, index, pages = events_engine(), PrefixIndex(), ReplicaPages()
    removed = 0
    for number in range(120):
        tokens = [number % 7 + 3] * 40 + [number % 11 + 3] * 60
        salt = "tenant" if number % 5 == 0 else ""
        events = engine.take_kv_events()
        removed += sum(each.kind == _core.KvEventKind.REMOVED for each in events)
        index.apply(events)
        pages.report(index.pages())
        expected = pages.matched(page_hashes(tokens[:-1], PAGE, salt)) * PAGE
        assert run(engine, tokens, salt) == expected, number
    assert removed > 50


def test_prompts_that_were_just_sent_count_for_some_seconds() -> None:
    now = [0.0]
    pages = ReplicaPages(lambda: now[0])
    hashes = list(page_hashes([5] * 64, PAGE))
    assert pages.matched(hashes) == 0
    pages.send(hashes)
    pages.report(b"another1")
    assert pages.matched(hashes) == 4
    now[0] = 6.0
    pages.report(b"another2")
    assert pages.matched(hashes) == 0


def test_pages_that_never_come_are_forgotten() -> None:
    now = [0.0]
    pages = ReplicaPages(lambda: now[0])
    hashes = list(page_hashes([5] * 64, PAGE))
    pages.send(hashes)
    now[0] = 6.0
    pages.report(b"")  # as before: a replica without a prefix cache
    assert pages.matched(hashes) == 0
    assert pages.count == 0


class Router(PrefixRouter):
    """Without a cluster."""

    def __init__(self, loads: dict[str, int]) -> None:
        self.initialize_state(page_size=PAGE, tokens_per_request=100)
        self.loads = loads
        self._pages = {name: ReplicaPages() for name in loads}

    @property
    def replica_queue_len_cache(self) -> Any:
        return self.loads


def pending_request(name: str, tokens: list[int]) -> Any:
    context = types.SimpleNamespace(should_backoff=False)
    metadata = types.SimpleNamespace(internal_request_id=f"ray-{name}")
    return types.SimpleNamespace(args=[EngineRequest(name, tokens, {})], routing_context=context, metadata=metadata)


def choose(router: Router, tokens: list[int], name: str = "x") -> list[str]:
    prompt_backlog.begin(name)
    return choose_again(router, tokens, name)


def choose_again(router: Router, tokens: list[int], name: str) -> list[str]:
    pending = pending_request(name, tokens)
    replicas: Any = [types.SimpleNamespace(replica_id=name) for name in router.loads]
    ranks = asyncio.run(router.choose_replicas(replicas, pending))
    return [str(each.replica_id) for (each,) in ranks]


def test_the_replica_with_the_least_to_do_is_first() -> None:
    router = Router({"a": 0, "b": 0, "c": 0})
    first, second = [5] * 160, [6] * 160
    assert choose(router, first)[0] == "a"
    assert choose(router, second)[0] == "b", "a has a prompt to compute"
    prompt_backlog.forget("x")
    assert choose(router, [*first, 9])[0] == "a", "its pages are there"
    router.loads["a"] = 1
    assert choose(router, [*first, 9])[0] == "a", "160 tokens outweigh a request"
    router.loads["a"] = 2
    assert choose(router, [*first, 9]) == ["c", "b", "a"], "but not two"
    prompt_backlog.forget("x")


@pytest.mark.parametrize(("seconds", "first"), [(0.03, "a"), (0.05, "b")])
def test_a_slow_replica_has_more_to_do(seconds: float, first: str) -> None:
    router = Router({"a": 0, "b": 0})
    router._token_seconds = {"a": seconds, "b": 0.01}
    prompt = [7] * 640
    router._pages["a"].send(list(page_hashes(prompt, PAGE, ""))[:30])
    assert choose(router, prompt)[0] == first, "a has three quarters of the prompt, and takes longer for the rest"
    prompt_backlog.forget("x")


def test_a_guess_of_a_time_does_not_outweigh_the_pages_of_a_prompt() -> None:
    """As replicas on one busy machine predict them after a few prompts each."""
    router = Router({"a": 0, "b": 0, "c": 0})
    router._token_seconds = {"a": 3.0e-3, "b": 1.9e-5, "c": 1.4e-3}
    prompt = [7] * 258
    router._pages["a"].send(page_hashes(prompt, PAGE))
    assert choose(router, prompt)[0] == "a"
    prompt_backlog.end("x")


def test_a_request_that_has_ended_does_not_count() -> None:
    """Ray counts it out later."""
    router = Router({"a": 0, "b": 0})
    prompt = [7] * 96
    assert choose(router, prompt, "first")[0] == "a"
    prompt_backlog.forget("first")
    router.on_request_routed(pending_request("first", prompt), cast("Any", "a"), None)
    router.loads["a"] = 1
    assert choose(router, prompt, "second")[0] == "b", "a request outweighs 96 tokens"
    router.on_request_completed(cast("Any", "b"), "ray-second")
    prompt_backlog.end("second")
    router._pages["b"] = ReplicaPages()
    prompt_backlog.end("first")
    assert choose(router, prompt, "third")[0] == "a"
    prompt_backlog.end("third")
    router.on_request_completed(cast("Any", "a"), "ray-first")
    router.loads["a"] = 0
    assert not router._ended()
    router.loads["a"] = 1
    assert choose(router, prompt, "fourth")[0] == "b", "somebody else's request runs there"
    prompt_backlog.end("fourth")


def test_requests_that_were_never_sent_are_forgotten() -> None:
    router = Router({"a": 0})
    choose(router, [7] * 16, "left")
    router.on_request_completed(cast("Any", "a"), "ray-unknown")
    assert len(router._requests) == 1
    prompt_backlog.end("left")
    router.forget_unsent()
    assert not router._requests


def test_prompts_without_a_first_token_count_by_their_length() -> None:
    router = Router({"a": 0, "b": 0})
    router._pages["b"].report(b"8 bytes.")  # of equal ones, a is emptier
    assert choose(router, [5] * 160, "long")[0] == "a"
    assert prompt_backlog.of("a") == 160
    assert choose(router, [6] * 32, "short")[0] == "b", "a has 160 tokens to compute"
    router.on_request_routed(pending_request("short", []), cast("Any", "a"), None)  # b was full
    assert (prompt_backlog.of("a"), prompt_backlog.of("b")) == (192, 0)
    prompt_backlog.forget("long")
    prompt_backlog.forget("short")
    prompt_backlog.forget("never sent")
    assert prompt_backlog.of("a") == 0
    assert choose(router, [7] * 16, "last")[0] == "b", "it is the emptier one now"
    assert choose_again(router, [7] * 16, "last")[0] == "b", "its pages are expected there"
    assert prompt_backlog.of("b") == 16, "a prompt that waits for a free replica counts once"
    router.on_request_routed(pending_request("last", []), cast("Any", "a"), None)
    assert (prompt_backlog.of("a"), prompt_backlog.of("b")) == (16, 0)
    prompt_backlog.forget("last")
    assert choose_again(router, [8] * 16, "gone")[0] in "ab"
    assert prompt_backlog.of("a") == prompt_backlog.of("b") == 0, "its client has gone before"


def test_a_prompt_counts_what_its_replica_lacks() -> None:
    router = Router({"a": 0, "b": 0})
    choose(router, [5] * 160, "first")
    prompt_backlog.forget("first")
    assert choose(router, [5] * 160, "second")[0] == "a"
    assert prompt_backlog.of("a") == 0, "it has the pages"
    router.on_request_routed(pending_request("second", []), cast("Any", "b"), None)  # a is full
    assert prompt_backlog.of("b") == 160
    prompt_backlog.forget("second")


def test_structures_of_the_engine_pass_on_whole() -> None:
    params = _core.SamplingParams()
    params.temperature, params.seed, params.logit_bias, params.max_tokens = 0.5, 7, [(3, 1.5)], 9
    copy = set_fields(_core.SamplingParams(), fields_of(params))
    assert fields_of(copy) == fields_of(params)
    assert {"temperature", "seed", "stop_token_ids", "prompt_logprobs"} <= fields_of(params).keys()
    assert "validate" not in fields_of(params)
    assert set(SamplingParams.__dataclass_fields__) & set(fields_of(params))
