"""HTTP/1.1 to the process of a model, over its Unix domain socket: requests and streams pass through unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

import h11
from starlette.types import Receive, Scope, Send

from kvanta.server.http.access import route_path
from kvanta.server.http.connections import MAX_HEADER_BYTES
from kvanta.server.http.errors import ApiError

_PIECE = 2**16
# Headers of one connection, and those that this server's own answer to the client has.
_OF_A_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection", b"expect")
)
_NOT_SENT = _OF_A_CONNECTION | {b"content-length", b"content-encoding", b"x-request-id"}  # the body is inflated
_NOT_RETURNED = _OF_A_CONNECTION | {b"date", b"x-request-id"}
Headers = Sequence[tuple[bytes, bytes]]


async def exchange(
    socket: str, method: str, target: str, headers: Headers = (), body: bytes = b""
) -> AsyncGenerator[h11.Response | bytes, None]:
    """The head of the answer, then the pieces of its body.

    Raises OSError for a process that is not there, h11.RemoteProtocolError for one that ends before its answer does.
    """
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * MAX_HEADER_BYTES)
        given = {name for name, _ in headers}
        own = [(b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        own += [] if b"host" in given else [(b"host", b"kvanta")]
        request = h11.Request(method=method, target=target, headers=[*headers, *own])
        for event in (request, h11.Data(body), h11.EndOfMessage()):
            writer.write(connection.send(event) or b"")
        await writer.drain()
        while True:
            received = connection.next_event()
            if received is h11.NEED_DATA:
                connection.receive_data(await reader.read(_PIECE))
            elif isinstance(received, h11.Response):
                yield received
            elif isinstance(received, h11.Data):
                yield bytes(received.data)
            elif isinstance(received, h11.EndOfMessage):
                return
    finally:
        writer.close()


async def get(socket: str, target: str, headers: Headers = ()) -> tuple[int, bytes]:
    """Status and body of a GET request of our own."""
    status, body = 0, b""
    async with contextlib.aclosing(exchange(socket, "GET", target, headers)) as answer:
        async for part in answer:
            if isinstance(part, bytes):
                body += part
            else:
                status = part.status_code
    return status, body


async def forward(socket: str, name: str, scope: Scope, body: bytes, send: Send) -> None:
    """Answers a request, whose body has been read, with the answer of model `name`. Raises ApiError."""
    headers = [(key, value) for key, value in scope["headers"] if key not in _NOT_SENT]
    headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
    target = urllib.parse.quote(route_path(scope))
    if scope["query_string"]:
        target += f"?{scope['query_string'].decode('latin-1')}"
    began = False

    async def answer() -> None:
        nonlocal began
        parts = exchange(socket, scope["method"], target, headers, body)
        async with contextlib.aclosing(parts):
            async for part in parts:
                if isinstance(part, bytes):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    continue
                kept = [(key, value) for key, value in part.headers if key not in _NOT_RETURNED]
                began = True
                await send({"type": "http.response.start", "status": part.status_code, "headers": kept})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    try:
        await answer()
    except (OSError, h11.RemoteProtocolError):
        if began:  # nothing can be said any more: the connection ends before the answer does
            return
        raise ApiError(503, f"the process of the model {name!r} ended before it answered", code="model_lost") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutine `work`, which is cancelled when the client leaves. The body has been read."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.create_task(leave())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
