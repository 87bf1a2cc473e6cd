"""Large requests and answers do not delay other clients: the event loop handles them in short time slices."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from live_server import LiveServer, error_of, events, live_server

from kvanta import _core
from kvanta.files.json_file import finite_values
from kvanta.server.http.errors import json_bytes
from kvanta.server.http.time_slices import BodyReader, _pieces, json_pieces, large_json_bytes

MOST_SECONDS = 5
"""Most CPU time of this process, with server and engine, between two answers to /ping: a machine that is busy with
others adds nothing to it. The work of each request on the event loop itself would take longer, or is found by
test_nothing_large_is_done_on_the_event_loop.
"""
JSON = {"Content-Type": "application/json"}
LONG = {"max_tokens": 500, "ignore_eos": True, "temperature": 0}

MANY = {**LONG, "prompt": "a", "n": 250, "max_tokens": 20, "logprobs": 20}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(max_body_bytes=8 << 20) as running:
        yield running


def longest_gap(server: LiveServer, work: Callable[[], None]) -> float:
    """Seconds of CPU time between two answers to /ping while `work` runs."""
    began, ended = threading.Event(), threading.Event()
    gaps: list[float] = []

    def ping() -> None:
        with httpx2.Client(base_url=server.url, timeout=120) as client:
            last = time.process_time()
            while not ended.is_set():
                assert client.get("/ping").status_code == 200
                now = time.process_time()
                gaps.append(now - last)
                last = now
                began.set()

    thread = threading.Thread(target=ping)
    thread.start()
    began.wait(120)  # the first answer makes the connection, before any other work
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return max(gaps)


def large(count: int, value: str) -> str:
    return "[" + ",".join([value] * count) + "]"


REQUESTS: list[tuple[str, str, str, int]] = [
    ("prompt_logprobs", "/v1/completions", json.dumps({"prompt": [5] * 500, "prompt_logprobs": 20, "n": 8}), 200),
    ("echo", "/v1/completions", json.dumps({"prompt": [[5] * 450] * 32, "echo": True, "logprobs": 20}), 200),
    ("many texts", "/v1/completions", json.dumps(MANY), 200),
    ("many streams", "/v1/completions", json.dumps({**MANY, "stream": True}), 200),
    ("token ids", "/detokenize", '{"tokens": ' + large(800_000, "7") + "}", 400),
    ("prompt ids", "/v1/completions", '{"prompt": ' + large(800_000, "7") + "}", 400),
    ("prompts", "/v1/completions", '{"prompt": ' + large(300_000, '"a"') + "}", 400),
    ("empty lists", "/v1/completions", '{"prompt": ' + large(900_000, "[]") + "}", 400),
    ("fields", "/v1/completions", '{"prompt": "a"' + "".join(f',"x{index}":1' for index in range(300_000)) + "}", 400),
    ("stops", "/v1/completions", '{"prompt": "a", "stop": ' + large(400_000, '"abcde"') + "}", 400),
    ("stop tokens", "/v1/completions", '{"prompt": "a", "stop_token_ids": ' + large(800_000, "7") + "}", 400),
    ("choices", "/v1/completions", '{"prompt": "a", "guided_choice": ' + large(400_000, '"abcde"') + "}", 400),
    ("a regex", "/v1/completions", '{"prompt": "a", "guided_regex": "' + "a" * 4_000_000 + '"}', 400),
    ("tokenize", "/tokenize", '{"prompt": "' + "a b " * 1_000_000 + '"}', 400),
    ("embeddings", "/v1/embeddings", json.dumps({"input": ["a"] * 2048}), 200),
    ("base64", "/v1/embeddings", json.dumps({"input": [[5] * 100] * 500, "encoding_format": "base64"}), 200),
    ("documents", "/rerank", '{"query": "a", "documents": ' + large(300_000, '"a"') + "}", 400),
    ("scores", "/score", json.dumps({"text_1": "a", "text_2": ["a b"] * 2048}), 200),
    ("messages", "/v1/chat/completions", '{"messages": ' + large(90_000, '{"role":"user","content":"a"}') + "}", 400),
]


@pytest.mark.parametrize(("name", "path", "body", "status"), REQUESTS, ids=[each[0] for each in REQUESTS])
def test_other_clients_are_served_meanwhile(server: LiveServer, name: str, path: str, body: str, status: int) -> None:
    def send() -> None:
        for _ in range(2):
            response = server.client.post(path, content=body, headers=JSON)
            assert response.status_code == status, response.text[:500]
            if status != 200:
                assert len(error_of(response)["message"]) < 400

    gap = longest_gap(server, send)
    print(f"longest gap, {name}: {gap * 1e3:.0f} ms")
    assert gap < MOST_SECONDS


def test_stop_strings_at_their_limits(server: LiveServer) -> None:
    stop = ["a" * 1023 + chr(0x100 + index) for index in range(64)]

    def send() -> None:
        answer = server.completion(prompt="a", stop=stop, n=50, **{**LONG, "max_tokens": 60})
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}

    assert longest_gap(server, send) < MOST_SECONDS


def test_nothing_large_is_done_on_the_event_loop(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of log-probabilities that are named on the event loop's thread, per turn: few."""
    from kvanta.engine import generation

    loop_thread = server.on_loop(threading.get_ident)
    named: Any = vars(generation)["add_logprobs"]
    on_loop = 0

    def counted(*arguments: Any) -> None:
        nonlocal on_loop
        on_loop += threading.get_ident() == loop_thread
        named(*arguments)

    monkeypatch.setattr(generation, "add_logprobs", counted)
    answer = server.completion(prompt=[5] * 500, prompt_logprobs=20, max_tokens=1)
    assert len(answer["choices"][0]["prompt_logprobs"]) == 500
    assert on_loop == 0


def read_all(bodies: list[bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """The values of bodies that have come together, and the most that an iteration of the event loop has read."""
    read_whole = json.loads
    iteration, most = 0, 0
    read: dict[int, int] = {}

    def loads(body: str) -> Any:
        nonlocal most
        read[iteration] = read.get(iteration, 0) + 1
        most = max(most, read[iteration])
        return read_whole(body)

    async def run() -> list[Any]:
        def count() -> None:
            nonlocal iteration
            iteration += 1
            loop.call_soon(count)

        loop = asyncio.get_running_loop()
        loop.call_soon(count)
        reader = BodyReader()
        return await asyncio.gather(*(reader.read_json(body) for body in bodies))

    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", loads)
        values = asyncio.run(run())
    return values, most


def test_large_bodies_are_read_one_in_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": "a b " * 100_000}).encode()
    assert read_all([body] * 4, monkeypatch) == ([json.loads(body)] * 4, 1)


def test_values_are_counted_outside_of_strings() -> None:
    text = '{"a,\\\\": [1.5, -2e7, true, "[{:,\\"1"], "b": {}} , "open [\\'
    assert _core.count_json(text.encode()) == (3, 2, 5, 0, 2)
    assert _core.count_json(b"") == (0, 0, 0, 0, 0)
    assert _core.count_json(b'"' + b"\\" * 8 + b'"[') == (1, 0, 0, 0, 0)
    assert _core.count_json(b'"\\') == (0, 0, 0, 0, 0)
    assert _core.count_json(bytes(range(256)) * 2) == (2, 1, 1, 0, 0)
    assert _core.count_json(b"[" + b"9" * 25 + b"," + b"1" * 19 + b"]") == (1, 0, 1, 6, 0)


def test_colons_and_brackets_of_a_text_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"prompt": '{"a": [1.5, 2]}, ' * 200_000}).encode()
    assert read_all([body], monkeypatch) == ([json.loads(body)], 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt": "a", "x": ' + b"9" * 5000 + b"}", "a number of more than 4300 digits"),
        (b'{"prompt": "a", "x": ' + large(20, "9" * 5000).encode() + b"}", "a number of more than 4300 digits"),
        (b'{"prompt": "\xe9"}', "UTF-8: invalid continuation byte at byte 12"),
        (b'{"prompt": "a", "x": ' + b"[" * 5_000, "nested too deeply"),
        (b'{"prompt": "a", "x": ' + b"[" * 50_000, "nested too deeply"),
        (b'{"prompt": "a", "x": ' + b"[" * 500_000, "too large to be read: 500001 lists and objects"),
        (b'{"x": ' + large(100_000, "1.7976931348623157e-308").encode() + b"}", "200000 fractions or exponents"),
        ('{"x":1}'.encode("utf-16"), "UTF-8: invalid start byte at byte 0"),
        (b'\xef\xbb\xbf{"prompt": ', "not valid JSON: Expecting value"),
        (b'{"prompt": "a", ', "not valid JSON: Expecting property name"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_bodies_that_cannot_be_read(server: LiveServer, body: bytes, reason: str) -> None:
    response = server.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert reason in error_of(response)["message"]


def test_large_fields_are_checked_by_another_thread(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvanta.server.requests import protocol

    loop_thread = server.on_loop(threading.get_ident)
    threads: list[int] = []
    check: Any = vars(protocol)["note_loosened"]

    def noted(outputs: Any, field: str) -> None:
        threads.append(threading.get_ident())
        check(outputs, field)

    monkeypatch.setattr(protocol, "note_loosened", noted)
    properties = {f"name{index}": {"type": "object", "not": {"type": "null"}} for index in range(2000)}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": properties}}}
    response = server.post("/v1/completions", prompt="a", max_tokens=1, response_format=form)
    assert response.headers["x-kvanta-ignored"] == "response_format.not"
    assert len(threads) == 1
    assert threads[0] != loop_thread


def test_a_large_answer_equals_its_stream(server: LiveServer) -> None:
    body = {**LONG, "prompt": [5] * 300, "n": 3, "max_tokens": 100, "logprobs": 20, "prompt_logprobs": 20, "seed": 1}
    whole = server.completion(**body)["choices"]
    texts = ["", "", ""]
    reasons: list[list[str]] = [[], [], []]
    prompt_logprobs: list[Any] = [None] * 3
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        for data in list(events(response))[:-1]:
            for choice in json.loads(data)["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
                prompt_logprobs[choice["index"]] = choice.get("prompt_logprobs", prompt_logprobs[choice["index"]])
    assert texts == [choice["text"] for choice in whole]
    assert reasons == [[choice["finish_reason"]] for choice in whole]
    assert prompt_logprobs == [choice["prompt_logprobs"] for choice in whole]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value, depth]
    return value


ENTRY = {"token": " é", "logprob": -0.1, "bytes": [195, 169], "top_logprobs": [{"token": "a", "logprob": -1e-05}] * 20}
VALUES: dict[str, Any] = {
    "empty": [{}, [], {"a": []}],
    "a lone surrogate": {"a": [1, 2, {"b": "é\ud800"}], "c": {"d": [[], [1]]}},
    "nulls": [{"x": None}] * 3,
    "plain values": [list(range(9999)), [True, None, 0.1, -0.0, 1e300, 1e16, 1e-7, 5e-324] * 999],
    "lists of different kinds": [["a"] * 5000, [], {}, "text", None],
    "one batch and one entry": list(range(4097)),
    "a prompt's log-probabilities": [None, *({"5": {"logprob": -1.5, "rank": index}} for index in range(5000))],
    "log-probabilities": {"choices": [{"index": 0, "logprobs": {"content": [ENTRY] * 500}}] * 3, "usage": {"n": 1}},
    "a wide object": {str(index): {"logprob": index / 7} for index in range(5000)},
    "escapes": {'"\\\b\n\x00\x1f\x7f\u2028/': "\t<>"},
    "integers": [2**64 - 1, 2**64, -(2**80), 2**53 + 1],
    "keys that are no texts": {1: {2: 3}},
    "deep nesting": _nested(400),
    "what is not finite": [1.0, float("nan"), {"a": float("inf")}, [[-float("inf")]]],
    "what is not finite, and a surrogate": [float("nan"), "\udfff"],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_json_has_the_values_of_the_standard_library(value: Any) -> None:
    expected = json.loads(json.dumps(finite_values(value), ensure_ascii=False).encode("utf-8", "replace"))
    for written in (json_bytes(value), large_json_bytes(value), b"".join(json_pieces(value))):
        assert json.loads(written) == expected


def test_pieces_are_short() -> None:
    """Each holds the interpreter as long as its values take."""
    for name in ("log-probabilities", "a prompt's log-probabilities", "a wide object", "plain values"):
        pieces = [*_pieces(VALUES[name], 0)]
        assert max(map(len, pieces)) < 20 * 4096, name
        assert 1 < len(pieces) < 20_000, name
    assert len([*_pieces(VALUES["log-probabilities"], 0)]) < 100


def test_many_token_ids_are_read(server: LiveServer) -> None:
    chat = [{"role": "user", "content": "Lily"}]
    other = {"user": "[" * 25_000 + "\\n", "x": [[1, "é", 1.5]]}
    assert server.post("/v1/chat/completions", messages=chat, max_tokens=1, **other).status_code == 200
    ids = server.post("/detokenize", tokens=[430] * 400, x=[[]] * 30_000)
    assert ids.json()["prompt"] == server.post("/detokenize", tokens=[430] * 400).json()["prompt"]
