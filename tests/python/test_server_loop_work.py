"""The event loop does a little work at a time, whatever a request has: CPU time of its thread for each callback."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, live_server
from loop_work import loop_work

from kvanta.server.http.errors import json_bytes
from kvanta.server.http.time_slices import discard, json_pieces
from kvanta.server.jobs.generation_job import GenerationJob

LONGEST_BODY = "[" + ",".join(["7"] * 300_000) + "]"
"""Takes as long to read as any body that the server accepts (time_slices.py)."""
MOST = 2.5
"""Times what LONGEST_BODY takes on this machine, twice what the dearest of these requests needs."""
TRIES = 6
"""The shortest is taken: the first may load modules, and other processes slow a thread's CPU time down."""
USER = {"role": "user", "content": "a"}
LONG = {"ignore_eos": True, "temperature": 0}


def large(count: int, value: str) -> str:
    return "[" + ",".join([value] * count) + "]"


def names(count: int, value: str) -> str:
    return "{" + ",".join(f'"name{index}":{value}' for index in range(count)) + "}"


def wide(count: int) -> dict[str, Any]:
    leaf = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    listed = [f"name{index}" for index in range(count)]
    return {**leaf, "properties": dict.fromkeys(listed, leaf), "required": listed}


SCHEMA = {"type": "json_schema", "name": "x", "strict": True, "schema": wide(10_000)}
FUNCTION = {"parameters": {"type": "object", "properties": {f"name{index}": {"type": "string"} for index in range(20)}}}
FUNCTIONS = [{"type": "function", "name": f"f{index}", **FUNCTION} for index in range(1000)]
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
PARAMETERS = {"max_new_tokens": 5, **LONG}
SCORES = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}

REQUESTS: dict[str, tuple[str, str, int]] = {
    "a text": ("/v1/responses", json.dumps({"input": "a b " * 900_000}), 400),
    "items": ("/v1/responses", '{"input":' + large(60_000, json.dumps(USER)) + "}", 400),
    "parts": ("/v1/responses", '{"input":[{"role":"user","content":' + large(60_000, '{"type":"text"}') + "}]}", 400),
    "functions": ("/v1/responses", json.dumps({"input": "a", "tools": FUNCTIONS, "max_output_tokens": 2}), 400),
    "a schema": ("/v1/responses", json.dumps({"input": "a", "text": {"format": SCHEMA}}), 400),
    "a field that is repeated": (
        "/v1/responses",
        '{"input":"a","max_output_tokens":2,"stream":true,"text":{"x":' + large(40_000, "[1]") + "}}",
        200,
    ),
    "metadata": ("/v1/responses", '{"input":"a","metadata":' + names(100_000, '"a"') + "}", 400),
    "logprobs": ("/v1/responses", json.dumps({"input": "a", "max_output_tokens": 300, **LONG, **LOGPROBS}), 200),
    "a stream of logprobs": (
        "/v1/responses",
        json.dumps({"input": "a", "max_output_tokens": 300, "stream": True, **LONG, **LOGPROBS}),
        200,
    ),
    "messages": ("/v1/messages", '{"max_tokens":1,"messages":' + large(60_000, json.dumps(USER)) + "}", 400),
    "blocks": (
        "/v1/messages",
        '{"max_tokens":1,"messages":[{"role":"user","content":' + large(60_000, '{"type":"text","text":"a"}') + "}]}",
        400,
    ),
    "stop sequences": (
        "/v1/messages",
        json.dumps({"messages": [USER], "max_tokens": 1, "stop_sequences": ["abc"] * 400_000}),
        400,
    ),
    "messages to count": ("/v1/messages/count_tokens", '{"messages":' + large(60_000, json.dumps(USER)) + "}", 400),
    "ids": ("/generate", '{"input_ids":' + large(800_000, "7") + "}", 400),
    "texts": ("/generate", '{"text":' + large(300_000, '"a"') + "}", 400),
    "parameters": ("/generate", '{"text":"a","sampling_params":' + names(200_000, "1") + "}", 400),
    "lists of parameters": (
        "/generate",
        '{"text":' + large(30_000, '"a"') + ',"sampling_params":' + large(30_000, '{"max_new_tokens":1}') + "}",
        400,
    ),
    "logprobs of prompts": (
        "/generate",
        json.dumps({"input_ids": [[5] * 450] * 32, "sampling_params": PARAMETERS, **SCORES}),
        200,
    ),
    "streams of logprobs": (
        "/generate",
        json.dumps({"input_ids": [[5] * 450] * 8, "sampling_params": PARAMETERS, "stream": True, **SCORES}),
        200,
    ),
    "bad words": ("/v1/completions", json.dumps({"prompt": "a", "bad_words": ["a"] * 10_000}), 400),
    "biases": ("/v1/completions", '{"prompt":"a","logit_bias":' + names(200_000, "1") + "}", 400),
    "long numbers": ("/v1/completions", '{"prompt":"a","max_tokens":1,"x":' + large(900, "9" * 4200) + "}", 400),
    "a body that is cut off": ("/v1/completions", '{"prompt":["' + "a" * 3_900_000, 400),
}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(max_body_bytes=8 << 20, tool_call_parser="hermes") as running:
        yield running


def send(server: LiveServer, path: str, body: str) -> int:
    """The status; the answer is not looked at, since the client shares a thread's time with the server."""
    client = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    client.request("POST", path, body.encode(), {"Content-Type": "application/json"})
    response = client.getresponse()
    while response.read(2**16):
        pass
    client.close()
    return response.status


def reading_seconds() -> float:
    """CPU time that LONGEST_BODY takes now, the shortest of three: a slow one would hide a long callback."""
    times = []
    for _ in range(3):
        begin = time.thread_time()
        json.loads(LONGEST_BODY)
        times.append(time.thread_time() - begin)
    return min(times)


@pytest.mark.parametrize("name", REQUESTS)
def test_callbacks_are_short(server: LiveServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, body, status = REQUESTS[name]
    longest: list[tuple[float, str]] = []
    while len(longest) < TRIES and (not longest or min(longest)[0] >= MOST):
        with loop_work(server, monkeypatch) as work:
            assert send(server, path, body) == status
            server.on_loop(threading.get_ident)  # runs after what ends the request
        longest.append((work.seconds / reading_seconds(), work.callback))
    print(f"{name}: {min(longest)[0]:.2f} in {min(longest)[1]}")
    assert min(longest)[0] < MOST, longest


def test_long_callbacks_are_found(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with loop_work(server, monkeypatch) as work:
        server.on_loop(lambda: sum(range(30_000_000)))
    assert work.seconds > MOST * reading_seconds()


def test_json_in_pieces_is_the_same_json() -> None:
    value = {"a": [{"text": "é" * 1000, "ids": list(range(100))}] * 500, "b": [], "c": {}}
    pieces = json_pieces(value)
    assert len(pieces) > 1
    assert b"".join(pieces) == json_bytes(value)
    assert json_pieces({}) == [b"{}"]


def test_a_discarded_tree_is_empty_but_for_lists_of_values() -> None:
    ids = [1, 2, 3]
    lists: list[Any] = [None, {"x": {"y": 1}}, [[{}]]]
    tree = {"ids": ids, "lists": lists, "more": [{"ids": ids}] * 10_000}
    discard(tree)
    assert (tree, ids, lists) == ({}, [1, 2, 3], [])


@pytest.mark.parametrize("name", ["logprobs of prompts", "streams of logprobs", "a stream of logprobs"])
def test_log_probabilities_are_freed_on_another_thread(
    server: LiveServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the connection would free all of them in one callback when it is lost."""
    freed: list[tuple[GenerationJob, int]] = []
    discard_logprobs = GenerationJob.discard_logprobs

    def recorded(job: GenerationJob) -> None:
        discard_logprobs(job)
        freed.append((job, threading.get_ident()))

    monkeypatch.setattr(GenerationJob, "discard_logprobs", recorded)
    path, body, status = REQUESTS[name]
    assert send(server, path, body) == status
    thread = server.on_loop(threading.get_ident)
    ((job, freeing_thread),) = freed
    assert freeing_thread != thread
    assert all(output.token_ids and not output.logprobs for output in job.outputs)
    assert not any(generation.output.prompt_logprobs for generation in job.generations)
