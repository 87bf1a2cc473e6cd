"""Garbage collections of the server: in full only while nothing runs, and with few objects to look at."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from live_server import live_server

from kvanta.outputs import FlatLogprobs
from kvanta.server.http.idle_collection import MAX_DELAY_SECONDS, IdleCollector, frozen_start


def make_garbage() -> None:
    """Enough objects for a collection of young ones."""
    kept = [[] for _ in range(2 * gc.get_threshold()[0])]  # type: ignore[var-annotated]
    del kept


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_full_collections_wait_for_idle_moments() -> None:
    load = SimpleNamespace(admitted=1, writing=0)
    collector = IdleCollector(load)
    make_garbage()
    before = full_collections()
    assert not collector.tick()
    load.admitted, load.writing = 0, 1
    assert not collector.tick()
    load.writing = 0
    assert collector.tick()
    assert full_collections() == before + 1
    assert not collector.tick(), "nothing has been made since"


def test_a_server_that_is_never_idle() -> None:
    load = SimpleNamespace(admitted=3, writing=0)
    collector = IdleCollector(load)
    make_garbage()
    assert [collector.tick() for _ in range(MAX_DELAY_SECONDS)] == [False] * (MAX_DELAY_SECONDS - 1) + [True]
    make_garbage()
    assert not collector.tick()


def test_old_objects_are_left_alone() -> None:
    thresholds = gc.get_threshold()
    with frozen_start():
        assert gc.get_freeze_count() > 10_000
        before = full_collections()
        kept = [[[]] for _ in range(200_000)]  # type: ignore[var-annotated]
        assert full_collections() == before
        del kept
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)


def test_logprobs_are_few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = 0
    add = FlatLogprobs.add

    def counted(self: FlatLogprobs, *arguments: object) -> None:
        nonlocal positions
        positions += 1
        add(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FlatLogprobs, "add", counted)
    with live_server() as server:
        server.completion(prompt="Once", logprobs=3, max_tokens=4, ignore_eos=True)
    assert positions == 4
