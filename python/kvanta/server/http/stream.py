"""Responses cancelled when their client disconnects; server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

CLIENT_GONE = 499  # nginx's status, for logs only: the client has gone


class Cancellable(Protocol):
    """A request's work."""

    def cancel(self) -> None:
        """Ends the unfinished work."""


@asynccontextmanager
async def cancelled_with_client(receive: Receive, job: Cancellable) -> AsyncIterator[None]:
    """Cancels the job when the client disconnects, and in any case at the end. The body has been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        job.cancel()


class EventStream(Response):
    """Events of a job."""

    def __init__(self, events: AsyncGenerator[bytes, None], job: Cancellable, media_type: str) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._events = events
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends every event as it comes."""
        async with cancelled_with_client(receive, self._job), aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class JsonPieces(Response):
    """A body of JSON that is sent piece by piece: to hand over a large one at once would copy all of it."""

    media_type = "application/json"

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(headers={**headers, "Content-Length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a piece when the one before has left."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
