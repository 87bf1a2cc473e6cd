"""Several engines behind one server, by Ray Serve: the same answers as of one, whichever of them die."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from live_server import LiveServer, events, live_server

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from server_process import KVANTA, free_port, replicas, server_process

OPTIONS = {"block_size": 16, "kv_cache_dtype": "int8"}
WORDS = ("--block-size", "16", "--kv-cache-dtype", "int8", "--kv-cache-memory-bytes", "16MiB", "--threads", "1")
SAMPLED = {"max_tokens": 300, "temperature": 0.9, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Fleet:
    """A server with replicas."""

    pid: int
    client: httpx2.Client

    def ask(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        match = re.search(rf"^kvanta:{name}{{[^}}]*}} (\S+)", self.client.get("/metrics").text, re.MULTILINE)
        assert match, name
        return float(match[1])

    def wait_for(self, count: int) -> None:
        """Waits until so many replicas have reported."""
        pause = threading.Event()
        for _ in range(1800):
            if len(replicas(self.pid)) == count and self.metric("replicas") == count:
                return
            pause.wait(0.1)
        raise AssertionError(f"{replicas(self.pid)} are not {count} replicas")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    port = free_port()
    command = [*KVANTA, "stories260k", "--replicas", "3", "--port", str(port), *WORDS]
    with (
        server_process(command, port) as process,
        httpx2.Client(base_url=process.url, timeout=120) as client,
    ):
        yield Fleet(process.pid, client)


@pytest.fixture(scope="module")
def quiet() -> Iterator[LiveServer]:
    """One engine in this process."""
    with live_server(options=OPTIONS) as running:
        yield running


def same(fleet: Fleet, quiet: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    """Both answer alike."""
    answer, wanted = fleet.ask(path, **body), quiet.client.post(path, json=body).json()
    for each in (answer, wanted):
        for name in ("id", "created", "model"):
            each.pop(name, None)
        each.get("usage", {}).pop("prompt_tokens_details", None)
    assert answer == wanted
    return answer


def test_answers_are_those_of_one_engine(fleet: Fleet, quiet: LiveServer) -> None:
    common = {"temperature": 0.8, "seed": 3, "max_tokens": 24}
    same(fleet, quiet, "/v1/completions", prompt="Once upon a time", logprobs=2, n=2, **common)
    same(fleet, quiet, "/v1/completions", prompt=["Tim", "Lily and"], echo=True, logprobs=1, **common)
    same(fleet, quiet, "/v1/completions", prompt="Tom", stop=["."], **common)
    same(fleet, quiet, "/v1/completions", prompt="One", frequency_penalty=1.5, min_tokens=10, **common)
    same(fleet, quiet, "/v1/embeddings", input=["a dog", "a cat"])


def test_constraints_run_at_the_replica(fleet: Fleet, quiet: LiveServer) -> None:
    common = {"prompt": "He said", "max_tokens": 20, "temperature": 0}
    answer = same(fleet, quiet, "/v1/completions", structured_outputs={"regex": "(yes|no)!"}, **common)
    assert answer["choices"][0]["text"] in ("yes!", "no!")
    same(fleet, quiet, "/v1/completions", bad_words=[" was"], **common)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [7] * 600}, "512"),
        ({"prompt": "x", "logit_bias": {"9999": 1}}, "9999"),
        ({"prompt": "x", "structured_outputs": {"regex": "("}}, "regex"),
    ],
)
def test_bad_requests_are_refused(fleet: Fleet, body: dict[str, Any], message: str) -> None:
    response = fleet.client.post("/v1/completions", json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_prompts_go_where_their_beginning_is(fleet: Fleet) -> None:
    """Nine conversations of two turns each; chance alone would find one in three."""
    histories = [[10 + number] * 256 for number in range(9)]  # outweighs a request that still counts as running
    for tokens in histories:
        fleet.ask(prompt=tokens, max_tokens=1)
    for tokens in histories:
        usage = fleet.ask(prompt=[*tokens, 7, 8], max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 256
    fleet.wait_for(3)
    assert fleet.client.post("/reset_prefix_cache").status_code == 200
    usage = fleet.ask(prompt=[*histories[0], 7, 8], max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def read_stream(url: httpx2.URL, body: dict[str, Any], begun: threading.Event) -> dict[str, Any]:
    """The text and token ids of a streamed completion; `begun` is set with its first content."""
    text, tokens, finish = "", [], None
    with (
        httpx2.Client(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response,
    ):
        for data in events(response):
            for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
                text += choice["text"]
                tokens += choice["token_ids"]
                finish = choice["finish_reason"]
            begun.set()
    return {"text": text, "tokens": tokens, "finish": finish}


def test_a_client_that_goes_away_frees_its_pages(fleet: Fleet) -> None:
    """The replica stops: it has made fewer tokens than were asked for."""
    before = fleet.metric("generation_tokens_total")
    body = {"prompt": [9], "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}
    with fleet.client.stream("POST", "/v1/completions", json=body) as response:
        assert next(events(response))
    pause = threading.Event()
    for _ in range(100):
        if fleet.metric("num_requests_running") == 0 and fleet.metric("generation_tokens_total") > before:
            break
        pause.wait(0.1)
    pause.wait(1.0)  # another report
    assert fleet.metric("num_requests_running") == 0
    assert fleet.metric("generation_tokens_total") - before < 500


def test_nobody_notices_that_replicas_die(fleet: Fleet, quiet: LiveServer) -> None:
    """Two of three are killed while twelve texts are written: each goes on elsewhere, with the same bits."""
    fleet.wait_for(3)
    bodies = [{"prompt": [20 + number] * 8, "seed": number, **SAMPLED} for number in range(12)]
    begun = [threading.Event() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        texts = [pool.submit(read_stream, fleet.client.base_url, *each) for each in zip(bodies, begun, strict=True)]
        for each in begun:
            assert each.wait(60)
        assert not all(each.done() for each in texts), "too late to kill anything"
        for victim in replicas(fleet.pid)[:2]:
            os.kill(victim, signal.SIGKILL)
        results = [each.result() for each in texts]
    assert fleet.metric("requests_moved_total") > 0, "nobody was interrupted"
    for body, result in zip(bodies, results, strict=True):
        choice = quiet.completion(**body)["choices"][0]
        assert result == {"text": choice["text"], "tokens": choice["token_ids"], "finish": "length"}
    fleet.wait_for(3)
