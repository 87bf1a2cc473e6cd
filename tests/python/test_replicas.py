"""Several engines of one server, by Ray Serve: the same answers as of one, whichever of them die."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest
from live_server import LiveServer, events, live_server

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

from server_process import KVANTA, ServerProcess, free_port, replicas, server_process

OPTIONS = {"block_size": 16, "kv_cache_dtype": "int8"}
WORDS = ("--block-size", "16", "--kv-cache-dtype", "int8", "--kv-cache-memory-bytes", "16MiB", "--threads", "1")
SAMPLED: dict[str, Any] = {"max_tokens": 300, "temperature": 0.9, "ignore_eos": True, "return_token_ids": True}


ATTEMPTS = 20
"""Attempts at a scenario whose request must still run when something happens to it, however fast the machine is."""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.1)
    raise AssertionError(f"not within minutes: {what}")


@dataclass
class Fleet:
    """A server with replicas."""

    process: ServerProcess
    client: httpx2.Client

    def ask(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metrics(self, *names: str) -> list[float]:
        """Values of one moment."""
        text = self.client.get("/metrics").text
        found = [re.search(rf"^kvanta:{name}{{[^}}]*}} (\S+)", text, re.MULTILINE) for name in names]
        return [float(each[1]) for each in found if each]

    def replicas(self) -> set[int]:
        """Processes of the replicas."""
        return set(replicas(self.process.pid))

    def wait_for(self, count: int) -> None:
        """Waits until so many replicas have reported."""
        wait_until(
            lambda: len(self.replicas()) == count and self.metrics("replicas") == [count], f"{count} replicas report"
        )

    def moved(self) -> list[int]:
        """Tokens of each request that went on at another replica, when it did."""
        return [int(count) for count in re.findall(r"(\d+) tokens have come, another", self.process.output())]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    port = free_port()
    command = [*KVANTA, "stories260k", "--replicas", "3", "--port", str(port), *WORDS]
    with (
        server_process(command, port) as process,
        httpx2.Client(base_url=process.url, timeout=120) as client,
    ):
        yield Fleet(process, client)


@pytest.fixture(scope="module")
def quiet() -> Iterator[LiveServer]:
    """One engine in this process."""
    with live_server(options=OPTIONS) as running:
        yield running


def same(fleet: Fleet, quiet: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    """The answer, which both servers must give."""
    answer, wanted = fleet.ask(path, **body), quiet.client.post(path, json=body).json()
    for each in (answer, wanted):
        for name in ("id", "created", "model"):
            each.pop(name, None)
        each.get("usage", {}).pop("prompt_tokens_details", None)
    assert answer == wanted
    return answer


def leave_stream(fleet: Fleet, max_tokens: int, before: int) -> float:
    """Tokens that the replicas have generated when the request of a client that has gone ends; `before`: others."""
    body = {"prompt": [9], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    with fleet.client.stream("POST", "/v1/completions", json=body) as response:
        assert next(events(response))
    generated = 0.0

    def ended() -> bool:
        nonlocal generated
        running, generated = fleet.metrics("num_requests_running", "generation_tokens_total")
        return running == 0 and generated > before

    wait_until(ended, "the replica reports the end")
    return generated - before


def test_a_client_that_goes_away_frees_its_pages(fleet: Fleet) -> None:
    """The replica stops: it makes fewer tokens than requested, unless it finishes before the news arrives.

    This server's first test, so that no other tokens are counted.
    """
    assert any(leave_stream(fleet, 500, 500 * attempt) < 500 for attempt in range(ATTEMPTS))


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
    """Nine conversations of two turns each; chance alone would find one in three.

    However long the replicas take: their predicted times differ by no more than the router's bound, and a request that
    has been answered does not count.
    """
    assert fleet.client.post("/reset_prefix_cache").status_code == 200
    wait_until(lambda: fleet.metrics("kv_cache_prefix_pages") == [0], "all have reported that they hold nothing")
    histories = [[10 + number] * 256 for number in range(9)]
    for tokens in histories:
        fleet.ask(prompt=tokens, max_tokens=1)
    wait_until(lambda: fleet.metrics("kv_cache_prefix_pages") >= [9 * 16], "the pages are reported")
    for tokens in histories:
        usage = fleet.ask(prompt=[*tokens, 7, 8], max_tokens=1)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 256
    fleet.wait_for(3)
    assert fleet.client.post("/reset_prefix_cache").status_code == 200
    usage = fleet.ask(prompt=[*histories[0], 7, 8], max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@dataclass
class StreamingClient:
    """A client that streams completions of one body, one after the other."""

    url: httpx2.URL
    body: dict[str, Any]
    received: int = 0
    """Tokens of the current completion, or of the last one."""
    has_token: threading.Event = field(default_factory=threading.Event)

    def stream(self) -> dict[str, Any]:
        """The text and token ids of a completion."""
        text, tokens, finish = "", [], None
        self.received = 0
        with (
            httpx2.Client(base_url=self.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json={**self.body, "stream": True}) as response,
        ):
            for data in events(response):
                for choice in [] if data == "[DONE]" else json.loads(data)["choices"]:
                    text += choice["text"]
                    tokens += choice["token_ids"]
                    finish = choice["finish_reason"]
                self.received = len(tokens)
                self.has_token.set()
        return {"text": text, "tokens": tokens, "finish": finish}

    def stream_until(self, over: threading.Event) -> list[dict[str, Any]]:
        """Results of at least one completion."""
        results = [self.stream()]
        while not over.is_set():
            results.append(self.stream())
        return results


def stop_in_the_middle(victims: Sequence[int], clients: Sequence[StreamingClient], max_tokens: int) -> None:
    """Stops processes of replicas while a text of theirs is between its first token and its last.

    A replica generates a text in less time than the server sends it in, so few moments would do: a stopped replica gets
    requests and goes on for a moment, until one of them is in the middle.
    """
    pause = threading.Event()
    for _ in range(100 * ATTEMPTS):
        for victim in victims:
            os.kill(victim, signal.SIGSTOP)
        pause.wait(0.2)  # all that was generated has come
        before = [client.received for client in clients]
        pause.wait(0.2)
        if any(0 < client.received == tokens < max_tokens for client, tokens in zip(clients, before, strict=True)):
            return
        for victim in victims:
            os.kill(victim, signal.SIGCONT)
        pause.wait(0.02)


def kill_in_the_middle(fleet: Fleet, clients: Sequence[StreamingClient], max_tokens: int) -> bool:
    """Kills two of three replicas. False if none of their texts was between its first token and its last."""
    fleet.wait_for(3)
    before = len(fleet.moved())
    victims = set(sorted(fleet.replicas())[:2])
    stop_in_the_middle(sorted(victims), clients, max_tokens)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)

    def interrupted() -> bool:
        return any(0 < tokens < max_tokens for tokens in fleet.moved()[before:])

    def replaced() -> bool:
        return len(fleet.replicas()) == 3 and not victims & fleet.replicas()

    wait_until(lambda: interrupted() or replaced(), "a text goes on, or there are three replicas again")
    return interrupted()


def test_nobody_notices_that_replicas_die(fleet: Fleet, quiet: LiveServer) -> None:
    """Two of three are killed while twelve clients stream: each text goes on elsewhere, with the same bits."""
    bodies = [{"prompt": [20 + number] * 8, "seed": number, **SAMPLED} for number in range(12)]
    clients = [StreamingClient(fleet.client.base_url, body) for body in bodies]
    over = threading.Event()
    with ThreadPoolExecutor(len(clients)) as pool:
        streaming = [pool.submit(client.stream_until, over) for client in clients]
        try:
            wait_until(lambda: all(client.has_token.is_set() for client in clients), "every client has a token")
            assert any(kill_in_the_middle(fleet, clients, SAMPLED["max_tokens"]) for _ in range(ATTEMPTS))
        finally:
            over.set()
        results = [each.result() for each in streaming]
    assert fleet.metrics("requests_moved_total")[0] > 0
    for body, texts in zip(bodies, results, strict=True):
        choice = quiet.completion(**body)["choices"][0]
        assert texts == [{"text": choice["text"], "tokens": choice["token_ids"], "finish": "length"}] * len(texts)
    fleet.wait_for(3)
