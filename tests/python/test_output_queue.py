"""Outputs of an engine that wait for an event loop, which a file descriptor wakes."""

import select
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config


def make_engine() -> _core.Engine:
    options = {"kv_cache_memory_bytes": "8MiB", "threads": 1, "max_num_seqs": 4}
    return _core.Engine(engine_config(str(resolve_model("stories260k").path), options))


@pytest.fixture
def engine() -> _core.Engine:
    return make_engine()


def sampling(tokens: int) -> _core.SamplingParams:
    params = _core.SamplingParams()
    params.temperature, params.ignore_eos, params.max_tokens = 0.0, True, tokens
    return params


def readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def test_outputs_come_in_order_and_as_many_as_asked_for(engine: _core.Engine) -> None:
    descriptor = engine.start_with_queue()
    assert not readable(descriptor, 0)
    for name in "ab":
        engine.add(name, [1, 5, 9], sampling(20))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    finished = 0
    while finished < 2:
        assert readable(descriptor, 60)
        engine_output = engine.pop_outputs(3)
        assert len(engine_output) <= 3
        for entry in engine_output:
            tokens[entry.id] += entry.tokens
            finished += entry.finish != _core.FinishReason.NONE
    assert not readable(descriptor, 0)
    assert engine.pop_outputs(3) == []
    assert tokens["a"] == tokens["b"]
    assert len(tokens["a"]) == 20
    engine.stop()


def test_an_engine_waits_for_its_reader_and_stops_without_one(engine: _core.Engine) -> None:
    descriptor = engine.start_with_queue()
    for name in range(8):
        engine.add(str(name), [1], sampling(400))
    assert readable(descriptor, 60)
    while engine.stats()["generated_tokens"] < 1024:
        select.select([], [], [], 0.001)
    engine.stop()  # 3,200 tokens would have come
    assert engine.stats()["generated_tokens"] < 1100
    assert 1024 <= len(engine.pop_outputs(5000)) < 1100


def test_arrays_are_never_converted(engine: _core.Engine) -> None:
    """A copy of `out` would be filled, and tokens would be cut to int32."""
    tokens, out = np.array([1, 5], dtype=np.int32), np.zeros((2, 512), dtype=np.float32)
    engine.logits(tokens, 0, out)
    assert out.all()
    doubles: Any = out.astype(np.float64)
    for wrong in (np.zeros((2, 1024), dtype=np.float32)[:, ::2], doubles):
        with pytest.raises(TypeError):
            engine.logits(tokens, 0, wrong)
    for other in (np.array([1, 2**33 + 1]), np.array([1.5, 2.5])):
        with pytest.raises(TypeError):
            engine.logits(other, 0, out)


def threads() -> set[Path]:
    """Threads of this process."""
    return set(Path("/proc/self/task").iterdir())


def test_an_engine_that_nobody_reads_can_be_dropped() -> None:
    engine = make_engine()  # a fixture would keep it
    before = threads()
    engine.start_with_queue()
    started = threads() - before
    assert len(started) == 1
    for name in range(8):
        engine.add(str(name), [1], sampling(400))
    while engine.stats()["generated_tokens"] < 1024:
        select.select([], [], [], 0.001)
    del engine
    for _ in range(1000):  # the system lists a thread for a moment after it was joined
        if not started & threads():
            return
        select.select([], [], [], 0.001)
    raise AssertionError("the engine's thread goes on")
