"""A timer for what is idle too long, such as a stream without an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class IdleTimer:
    """Calls a function when `restart` has not been called for some seconds, and again after as many.

    Nothing is scheduled at a restart, since there is one for every token of a stream: the timer looks at the time when
    it would have expired.
    """

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        """`seconds`: 0 for a timer that never expires. The event loop must be running."""
        self._seconds = seconds
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self.expired = False
        """Since the last restart."""

    def restart(self) -> None:
        """Something has happened."""
        self.expired = False
        self._due = self._loop.time() + self._seconds

    def __enter__(self) -> Self:
        self.restart()
        if self._seconds > 0:
            self._handle = self._loop.call_at(self._due, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._due:
            self.expired = True
            self._due = now + self._seconds
            self._call()
        self._handle = self._loop.call_at(self._due, self._look)
