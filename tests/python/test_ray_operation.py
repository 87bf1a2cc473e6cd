"""Operation of replicas under Ray Serve: updates, draining, scaling, replicas of other models, ports that are taken."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import socket
import subprocess
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from live_server import events

from kvanta import LLM, InputError, SamplingParams, StructuredOutputsParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)


import ray
from ray import serve
from ray.serve.config import AutoscalingConfig
from server_process import KVANTA, free_port

import kvanta.ray
from kvanta import _core
from kvanta.generation import ConstraintRecipe
from kvanta.prompts import TokenPrompt
from kvanta.ray.autoscaling import CACHE_OCCUPANCY, ByRequestsAndCache
from kvanta.ray.engine_replica import EngineReplica
from kvanta.ray.messages import EngineRequest, OtherEngineError, RemoteOutput, fields_of, identity_of, pack_recipe
from kvanta.structured_output import GrammarCompiler

SIZES: dict[str, Any] = {"block_size": 16, "threads": 1, "kv_cache_memory_bytes": "8MiB"}
ARGUMENTS: dict[str, Any] = {
    **SIZES,
    "model": "stories260k",
    "kv_cache_dtype": "int8",
    "ray_actor_options": {"num_cpus": 0},
}
CLIENTS = 4
TOKENS = 200
MAX_LATER = 100
"""Requests of a client after a change, at most."""


class Application:
    """The application behind Ray's proxy."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._changes: dict[str, Any] | None = None

    def deploy(self, **changes: Any) -> None:
        """Returns when all replicas are those of the new configuration."""
        self._changes = None
        serve.run(kvanta.ray.app({**ARGUMENTS, **changes}), name="kvanta", route_prefix="/")
        self._changes = changes

    def begin(self, **changes: Any) -> None:
        """The same, unless the test before has left this configuration."""
        if changes != self._changes:
            self.deploy(**changes)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    port = free_port()
    ray.init("local", include_dashboard=False, num_cpus=8, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield Application(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas_of(wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Descriptions of the replicas, when they are as wanted."""
    handle = serve.get_deployment_handle("EngineReplica", "kvanta")
    pause = threading.Event()
    found: list[dict[str, Any]] = []
    for _ in range(1500):
        found = handle.broadcast("describe").results(timeout_s=60)
        if wanted(found):
            return found
        pause.wait(0.2)
    raise AssertionError(f"{len(found)} replicas, not as wanted")


def answers(kv_cache_dtype: str) -> list[list[int]]:
    """Tokens of one engine for each client's request."""
    llm = LLM("stories260k", kv_cache_dtype=kv_cache_dtype, **SIZES)
    texts = []
    for number in range(CLIENTS):
        params = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=number, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": [20 + number] * 40}], params)
        texts.append(list(output.outputs[0].token_ids))
    return texts


def stream(url: str, number: int, begun: threading.Event | None = None) -> list[int] | str:
    """The tokens of a client's request, or what went wrong; `begun` is set with the first of them."""
    body = {"max_tokens": TOKENS, "temperature": 0.9, "seed": number, "ignore_eos": True, "return_token_ids": True}
    request = {**body, "prompt": [20 + number] * 40, "stream": True}
    tokens: list[int] = []
    done = False
    with (
        httpx2.Client(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=request) as response,
    ):
        if response.status_code != 200:
            return response.read().decode()
        for data in events(response):
            done = data == "[DONE]"
            event = {"choices": []} if done else json.loads(data)
            if "error" in event:
                return json.dumps(event)
            tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
            if begun is not None:
                begun.set()
    return tokens if done else "the stream ended early"


def while_clients_stream(
    url: str, change: Callable[[], object], is_last: Callable[[int, list[int] | str], bool] = lambda *_: True
) -> list[tuple[int, list[int] | str]]:
    """Results by the client's number: requests one after the other, before, during and after a change.

    All clients are in the middle of a stream when the change begins. Each goes on after it until a result `is_last`.
    """
    results: list[tuple[int, list[int] | str]] = []
    stop, begun = threading.Event(), [threading.Event() for _ in range(CLIENTS)]

    def ask(number: int, begun: threading.Event | None = None) -> bool:
        results.append((number, stream(url, number, begun)))
        return is_last(*results[-1])

    def ask_on(number: int) -> None:
        ask(number)
        ask(number, begun[number])
        begun[number].set()  # whatever became of it
        while not stop.is_set():
            ask(number)
        any(ask(number) for _ in range(MAX_LATER))

    with ThreadPoolExecutor(CLIENTS) as pool:
        asking = [pool.submit(ask_on, number) for number in range(CLIENTS)]
        try:
            assert all(each.wait(300) for each in begun)
            change()
        finally:
            stop.set()
        for each in asking:
            each.result()
    return results


def test_the_application_answers_behind_rays_proxy(application: Application) -> None:
    """Two fronts, each with a router."""
    application.begin(replicas=2, fronts=2, served_model_name=["tiny"])
    body = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 1, "temperature": 0.8}
    with httpx2.Client(base_url=application.url, timeout=60) as client:
        answer = client.post("/v1/completions", json=body).json()
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            pieces = [json.loads(data)["choices"][0]["text"] for data in events(response) if data != "[DONE]"]
        models = [each["id"] for each in client.get("/v1/models").json()["data"]]
        assert client.post("/v1/completions", json={"prompt": []}).status_code == 400
    llm = LLM("stories260k", kv_cache_dtype="int8", **SIZES)
    params = SamplingParams(max_tokens=12, seed=1, temperature=0.8)
    wanted = llm.generate("Once upon a time", params)[0].outputs[0].text
    assert answer["choices"][0]["text"] == "".join(pieces) == wanted
    assert models == ["tiny"]


def test_an_update_rolls_while_clients_stream(application: Application) -> None:
    """Every process is replaced, fronts included, and nobody notices."""
    application.begin(replicas=2, fronts=2, served_model_name=["tiny"])
    wanted = answers("int8")
    results = while_clients_stream(application.url, lambda: application.deploy(replicas=2, max_num_seqs=7))
    assert [result for number, result in results if result != wanted[number]] == []
    replicas_of(lambda all_: [each["config"]["max_num_seqs"] for each in all_] == [7, 7])


def test_an_update_to_another_format_mixes_no_answers(application: Application) -> None:
    """Fronts of the old application use no replicas of the new one, and the reverse."""
    application.begin(replicas=2, max_num_seqs=7)
    old, new = answers("int8"), answers("bf16")
    assert all(left != right for left, right in zip(old, new, strict=True))
    # Ray's proxy may send some more requests to the old front.
    results = while_clients_stream(
        application.url,
        lambda: application.deploy(replicas=2, kv_cache_dtype="bf16"),
        lambda number, result: result == new[number],
    )
    texts = [(number, result) for number, result in results if not isinstance(result, str)]
    assert all(text in (old[number], new[number]) for number, text in texts)
    assert [result for _, result in results if isinstance(result, str) and "another model" not in result] == []
    assert {number for number, text in texts if text == old[number]} == set(range(CLIENTS))
    assert {number for number, text in texts if text == new[number]} == set(range(CLIENTS))


def test_a_replica_that_is_to_end_finishes_its_requests(application: Application) -> None:
    application.begin(replicas=2, kv_cache_dtype="bf16")
    wanted = answers("bf16")

    def scale_down() -> None:
        application.deploy(replicas=1, kv_cache_dtype="bf16")
        replicas_of(lambda all_: len(all_) == 1)

    results = while_clients_stream(application.url, scale_down)
    assert [result for number, result in results if result != wanted[number]] == []
    metrics = httpx2.get(f"{application.url}/metrics", timeout=60).text
    [moved] = [line for line in metrics.splitlines() if line.startswith("kvanta:requests_moved_total")]
    assert float(moved.rsplit(" ", 1)[1]) == 0


def test_full_caches_call_for_replicas(application: Application) -> None:
    """The requests alone would not: target_ongoing_requests is far above them."""
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1000, "target_cache_occupancy": 0.05}
    pace = {"upscale_delay_s": 0, "downscale_delay_s": 0, "metrics_interval_s": 0.5, "look_back_period_s": 2}
    application.deploy(replicas="auto", autoscaling_config={**scaling, **pace}, kv_cache_memory_bytes="200KB")
    replicas_of(lambda all_: len(all_) == 1)
    while_clients_stream(application.url, lambda: replicas_of(lambda all_: len(all_) == 2))
    replicas_of(lambda all_: len(all_) == 1)


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
    """And a caller that leaves meanwhile leaves nothing behind."""
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


def test_a_port_that_is_taken_ends_the_command_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        command = [*KVANTA, "stories260k", "--replicas", "2", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr
