"""Full collections of garbage while no text is generated: each looks at all objects, and every thread waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator

_NEVER = 2**30
_YOUNG = (2000, 10)
"""Objects until a collection of the youngest; such collections until one of the next older, which are as many again."""
_SECONDS = 5.0
"""Between two looks at the load."""
MOST_SECONDS = 600.0
"""Under load without an end."""


@contextlib.contextmanager
def few_collections() -> Iterator[None]:
    """Python itself collects young objects alone, and those that exist now are never looked at again."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_YOUNG, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()  # else the engine would not be freed at exit


async def collect_when_idle(busy: Callable[[], bool], *, seconds: float = _SECONDS) -> None:
    """Until cancelled. `busy`: requests are open."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        collections = gc.get_count()[2]  # of the middle generation, since the last full one
        if collections and (not busy() or time.monotonic() - last > MOST_SECONDS):
            gc.collect()
            last = time.monotonic()
