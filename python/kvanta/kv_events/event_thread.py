"""The thread that takes an engine's KV events and gives them to their consumers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from kvanta import _core

_WAIT = 0.1
"""Seconds between calls of idle() while the cache does not change."""
_PAUSE = 0.01
"""Least seconds between two batches: steps that follow each other share one."""


class EventConsumer(Protocol):
    """Every method is called on the thread."""

    def apply(self, events: Sequence[_core.KvEvent]) -> None:
        """Takes the next events, at least one."""

    def idle(self) -> None:
        """Called after every batch, and at least every 100 ms."""

    def close(self) -> None:
        """Called once, at the end."""


class KvEventThread:
    """Runs until close(). An engine has one at most: events are given out once."""

    def __init__(self, engine: _core.Engine, consumers: Sequence[EventConsumer]) -> None:
        self._engine = engine
        self._consumers = consumers
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives out what has happened, and ends."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(_PAUSE):
            self._take(_WAIT)
        self._take(0)
        for each in self._consumers:
            each.close()

    def _take(self, wait: float) -> None:
        try:
            events = self._engine.take_kv_events(wait)
        except MemoryError:  # the next call begins again with all pages
            return
        for each in self._consumers:
            if events:
                each.apply(events)
            each.idle()
