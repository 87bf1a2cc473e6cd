"""Bodies that arrive slowly, by a clock of the test's own: each connection is free again in time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from kvanta.server.http.access import AccessControl
from kvanta.server.http.errors import ApiError, error_response

LIMIT = 4 << 20


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time passes when a test says so."""

    now = 0.0

    def time(self) -> float:
        return self.now


def send_body(pieces: Iterable[tuple[float, int]]) -> tuple[int, float, bytes]:
    """Status, seconds and headers of the answer to a body of pieces: seconds before each, and its bytes."""
    loop = Clock()
    left = iter(pieces)
    sent: list[Message] = []

    async def receive() -> Message:
        seconds, size = next(left, (0.0, 0))
        loop.now += seconds
        for _ in range(3):  # iterations in which timers run
            await asyncio.sleep(0)
        return {"type": "http.request", "body": b"a" * size, "more_body": size > 0}

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer: Response
        try:
            answer = PlainTextResponse(str(len(await Request(scope, receive).body())))
        except ApiError as error:
            answer = error_response(error, scope["path"])
        await answer(scope, receive, send)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    try:
        loop.run_until_complete(AccessControl(app, [], LIMIT)(scope, receive, send))
    finally:
        loop.close()
    return sent[0]["status"], loop.now, dict(sent[0]["headers"]).get(b"connection", b"")


@pytest.mark.parametrize(
    "pieces",
    [
        [(61.0, 1)],
        itertools.repeat((59.0, 1)),
        itertools.repeat((1.0, 1024)),
        [(0.0, 2 << 20), (61.0, 1)],
    ],
    ids=["silence", "a byte a minute", "1 KiB/s", "silence after much"],
)
def test_slow_bodies_end(pieces: Iterable[tuple[float, int]]) -> None:
    status, seconds, connection = send_body(pieces)
    assert status == 408
    assert 60 <= seconds <= 120
    assert connection == b"close"


@pytest.mark.parametrize(
    "pieces",
    [[(59.0, 1000)], [(1.0, 20 << 10)] * 204, [(50.0, 1 << 20)] * 4],
    ids=["late", "20 KiB/s", "large pieces"],
)
def test_other_bodies_are_read(pieces: list[tuple[float, int]]) -> None:
    assert send_body(pieces)[0] == 200
