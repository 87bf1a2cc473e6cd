"""Garbage is collected while the server is idle: no full collection interrupts the streams."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest

from kvanta.server import garbage
from kvanta.server.garbage import collect_when_idle, few_collections


class Node:
    """A cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


def full_collections(work: Callable[[], object]) -> int:
    found = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(info)

    gc.callbacks.append(noted)
    try:
        work()
    finally:
        gc.callbacks.remove(noted)
    return len(found)


def test_many_objects_cause_no_full_collection() -> None:
    def work() -> None:
        kept = [[index] for index in range(400_000)]
        assert len(kept) == 400_000

    before = gc.get_threshold()
    assert full_collections(work) > 0
    with few_collections():
        assert full_collections(work) == 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def old_garbage() -> weakref.ref[Node]:
    """A cycle that only a full collection finds."""
    node = Node()
    gc.collect(1)
    return weakref.ref(node)


@pytest.mark.parametrize(("busy", "most_seconds"), [(False, 600.0), (True, 600.0), (True, 0.0)])
def test_old_garbage_goes_while_the_server_is_idle_or_after_a_long_time(
    busy: bool, most_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def is_busy() -> bool:
        nonlocal looks
        looks += 1
        return busy

    async def run() -> bool:
        node = old_garbage()
        task = asyncio.create_task(collect_when_idle(is_busy, seconds=0.001))
        while looks < 4:
            assert len([[index] for index in range(30_000)]) == 30_000  # some collections of young objects
            await asyncio.sleep(0.001)
        task.cancel()
        return node() is None

    monkeypatch.setattr(garbage, "MOST_SECONDS", most_seconds)
    with few_collections():
        assert asyncio.run(run()) == (not busy or most_seconds == 0)
