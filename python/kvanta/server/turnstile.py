"""Requests for texts enter a few per turn of the event loop, so that a crowd of them does not delay everyone else."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

PER_TURN = 4


class Turnstile:
    """Lets POST requests to `app` in, in the order of their arrival; those of other methods at once.

    The event loop handles all that is ready in one turn. A request for texts is read, checked and queued without a
    pause, in some milliseconds: a hundred that have come together would hold up streams and /health for a second.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._entered = 0  # in this turn
        self._turning = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._enter()
        await self._app(scope, receive, send)

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn)
        if self._entered < PER_TURN and not self._waiting:
            self._entered += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        """Once per turn, as long as somebody enters or waits."""
        self._entered = 0
        while self._waiting and self._entered < PER_TURN:
            place = self._waiting.popleft()
            if not place.done():  # else its task was cancelled
                place.set_result(None)
                self._entered += 1
        self._turning = self._entered > 0
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)
