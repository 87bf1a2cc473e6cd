"""Admission limiter: a few generation requests per iteration of the event loop, so that a burst delays nobody else."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

PER_ITERATION = 4


class AdmissionLimiter:
    """Admits POST requests to `app` in order of arrival; other methods pass at once.

    The event loop handles everything ready in one iteration. A generation request is read, checked and queued without
    a pause, in some milliseconds: a burst of a hundred would hold up streams and /health for a second.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._entered = 0  # in this iteration
        self._scheduled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._enter()
        await self._app(scope, receive, send)

    async def _enter(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._admit_waiting)
        if self._entered < PER_ITERATION and not self._waiting:
            self._entered += 1
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _admit_waiting(self) -> None:
        """Runs once per iteration, as long as requests are admitted or waiting."""
        self._entered = 0
        while self._waiting and self._entered < PER_ITERATION:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its task was cancelled
                waiter.set_result(None)
                self._entered += 1
        self._scheduled = self._entered > 0
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._admit_waiting)
