"""Operation of replicas under Ray Serve: updates, draining, scaling, replicas of other models, ports that are taken."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import events

from kvanta import LLM, SamplingParams

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)


import ray
from ray import serve
from redis_process import RedisProcess, running_redis
from server_process import KVANTA, descendants, free_port, server_process
from test_roles import BODY, OPTIONS, PROMPT_TOKENS, prompt, wanted

import kvanta.ray

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
    """The application, reached through Ray's proxy."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ray_address: str = ray.get_runtime_context().gcs_address
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

    def delete(self) -> None:
        """Ends all replicas; Ray goes on."""
        self._changes = None
        serve.delete("kvanta")


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


def test_the_application_answers_through_rays_proxy(application: Application) -> None:
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


def prefill_replicas() -> list[int]:
    """Processes; those of the cluster are descendants of this one."""
    names = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in descendants(os.getpid())}
    return [each for each, name in names.items() if b"PrefillReplica" in name]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with running_redis(tmp_path) as process:
        yield process


def test_a_server_with_replicas_by_role_on_this_cluster(application: Application, redis: RedisProcess) -> None:
    """A prompt goes to a prefill replica first; after its death, prompts are computed where they are needed.

    The last one: a server that ends takes Ray Serve down.
    """
    application.delete()
    alone = LLM("stories260k", **OPTIONS)
    port = free_port()
    words = ["--block-size", "16", "--kv-cache-dtype", "int8", "--kv-cache-memory-bytes", "1MiB", "--threads", "1"]
    store = ["--kv-store", f"redis://127.0.0.1:{redis.port}", "--prefill-replicas", "1"]
    command = [*KVANTA, "stories260k", "--port", str(port), *words, *store]
    environment = {"RAY_ADDRESS": application.ray_address}
    with (
        server_process(command, port, environment=environment) as process,
        httpx2.Client(base_url=process.url, timeout=60) as client,
    ):

        def ask(stem: int) -> int:
            answer = client.post("/v1/completions", json={**BODY, "prompt": prompt(stem)}).json()
            assert answer["choices"][0]["token_ids"] == wanted(alone, prompt(stem))
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        # A prompt waits some seconds for a prefill replica to report, which a slow one may miss.
        assert any(ask(stem) >= 0.95 * PROMPT_TOKENS for stem in range(10, 30))
        assert ask(7) >= 0.95 * PROMPT_TOKENS
        [victim] = prefill_replicas()
        os.kill(victim, signal.SIGKILL)
        ask(8)
        ask(9)


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
