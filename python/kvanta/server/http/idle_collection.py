"""Full garbage collections while no client waits.

Nearly everything here is freed by its reference count. A full collection looks at all objects that are alive, and every
stream stands still. Python would start one whenever they have grown by a quarter.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_SECONDS = 1.0
_NEVER = 1_000_000_000
MAX_DELAY_SECONDS = 60
"""Longest time without a full collection for a server that is never idle."""


class Load(Protocol):
    """The requests of a server."""

    @property
    def admitted(self) -> int:
        """Sequences that are not finished."""

    @property
    def writing(self) -> int:
        """Large answers that are being written: they have many objects for a short time."""


@contextmanager
def frozen_start() -> Iterator[None]:
    """Leaves alone what is alive now, and collects the young objects alone. Undone at the end."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what lives for ever need not be looked at again
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # else the engine would not be freed at exit


class IdleCollector:
    """Decides once per second."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._seen = self._young()
        self._waited = 0

    @staticmethod
    def _young() -> int:
        """Collections of young objects so far: without any, there is nothing to find."""
        return sum(int(each["collections"]) for each in gc.get_stats()[:2])

    def tick(self) -> bool:
        """True if everything was collected."""
        self._waited += 1
        idle = not self._load.admitted or self._waited >= MAX_DELAY_SECONDS
        if self._load.writing or not idle or self._young() == self._seen:
            return False
        gc.collect()
        self._seen, self._waited = self._young(), 0
        return True

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            self.tick()
