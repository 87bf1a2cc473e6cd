"""Engines of Ray Serve's replicas in this process, and the policy that scales them; no cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import threading
import types
from typing import Any

import pytest

from kvanta import LLM, InputError, SamplingParams, StructuredOutputsParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from ray import serve
from ray.serve.config import AutoscalingConfig

import kvanta.ray
from kvanta import _core
from kvanta.constraints.structured_output import ConstraintRecipe, GrammarCompiler
from kvanta.ray.autoscaling import CACHE_OCCUPANCY, ByRequestsAndCache
from kvanta.ray.engine_replica import EngineReplica
from kvanta.ray.messages import EngineRequest, OtherEngineError, RemoteOutput, fields_of, identity_of, pack_recipe
from kvanta.text.prompts import TokenPrompt

SIZES: dict[str, Any] = {"block_size": 16, "threads": 1, "kv_cache_memory_bytes": "8MiB"}


def context(requests: float, *occupancy: float) -> Any:
    config = AutoscalingConfig(min_replicas=1, max_replicas=10, target_ongoing_requests=8)
    metrics = {CACHE_OCCUPANCY: dict(enumerate(occupancy))} if occupancy else None
    return types.SimpleNamespace(config=config, total_num_requests=requests, aggregated_metrics=metrics)


def test_the_policy_takes_the_larger_need() -> None:
    policy = ByRequestsAndCache(target_cache_occupancy=0.5)
    assert policy(context(24))[0] == 3
    assert policy(context(8, 0.9, 0.6))[0] == pytest.approx(3)
    assert policy(context(40, 0.9, 0.6))[0] == 5


@pytest.mark.parametrize("target", [0, 1.5, "much", True])
def test_bad_targets_are_named(target: Any) -> None:
    with pytest.raises(InputError, match="target_cache_occupancy must be above 0"):
        kvanta.ray.app(model="m", replicas="auto", autoscaling_config={"target_cache_occupancy": target})


def request_for(identity: str) -> EngineRequest:
    return EngineRequest("x", [5, 6, 7], {**fields_of(_core.SamplingParams()), "max_tokens": 2}, identity=identity)


async def ask_replica(kv_cache_dtype: str, identity: str | None) -> list[RemoteOutput]:
    """Outputs of a replica in this process; `identity`: None for its own."""
    replica = EngineReplica("stories260k", {**SIZES, "kv_cache_dtype": kv_cache_dtype})
    own = (await replica.describe())["identity"]
    return await outputs_of(replica, request_for(own if identity is None else identity))


async def outputs_of(replica: EngineReplica, request: EngineRequest) -> list[RemoteOutput]:
    return [output async for outputs in replica.generate(request) for output in outputs]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For replicas in this process."""
    rank = types.SimpleNamespace(rank=types.SimpleNamespace(rank=0))
    monkeypatch.setattr(serve, "get_replica_context", lambda: rank)


@pytest.mark.usefixtures("in_process")
def test_a_replica_without_a_prefix_cache() -> None:
    async def run() -> tuple[Any, bytes]:
        replica = EngineReplica("stories260k", {**SIZES, "enable_prefix_caching": False})
        own = (await replica.describe())["identity"]
        outputs = await outputs_of(replica, request_for(own))
        return outputs[-1].finish, replica.record_routing_stats()["pages"]

    assert asyncio.run(run()) == (_core.FinishReason.LENGTH, b"")


@pytest.mark.usefixtures("in_process")
def test_a_replica_goes_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of a caller that leaves meanwhile is dropped entirely."""
    pytest.importorskip("llguidance")
    compiling, released = threading.Event(), threading.Event()

    def slow(self: GrammarCompiler, grammar: str, kind: str) -> Any:
        compiling.set()
        assert released.wait(60), "nothing else has run"
        return compile_one(self, grammar, kind)

    compile_one = GrammarCompiler._matcher
    monkeypatch.setattr(GrammarCompiler, "_matcher", slow)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["cat", "dog"]))
    recipe = pack_recipe(ConstraintRecipe(TokenPrompt("a", [5]), params, [], None))

    async def run() -> list[Any]:
        replica = EngineReplica("stories260k", SIZES)
        own = (await replica.describe())["identity"]
        constrained = dataclasses.replace(request_for(own), constraint=recipe)
        waiting, leaving = (asyncio.create_task(outputs_of(replica, constrained)) for _ in range(2))
        while not compiling.is_set():
            await asyncio.sleep(0)
        others = await outputs_of(replica, request_for(own))
        leaving.cancel()
        await asyncio.wait([leaving])
        released.set()
        finishes = [others[-1].finish, (await waiting)[-1].finish, leaving.cancelled()]
        assert replica._outputs == {}
        return finishes

    assert asyncio.run(run()) == [_core.FinishReason.LENGTH, _core.FinishReason.LENGTH, True]


@pytest.mark.usefixtures("in_process")
def test_a_replica_refuses_requests_for_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another cache format, or of another version."""
    assert asyncio.run(ask_replica("int8", None))[-1].finish == _core.FinishReason.LENGTH
    engine = LLM("stories260k", kv_cache_dtype="int8", **SIZES)._engine
    other = LLM("stories260k", kv_cache_dtype="int4_per_token_head", **SIZES)._engine
    assert identity_of(engine) != identity_of(other)
    with pytest.raises(OtherEngineError):
        asyncio.run(ask_replica("int8", identity_of(other)))
    mine = identity_of(engine)
    monkeypatch.setattr(kvanta, "__version__", "0.0.1")
    assert identity_of(engine) != mine
