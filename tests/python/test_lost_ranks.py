"""Ranks of either kind that are killed, or live without answering, while the engine runs."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest

from kvanta import LLM, RankLostError, ResourceError, SamplingParams

TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"


def ranks_by(option: str, ranks: int, **options: Any) -> LLM:
    """Engine of that many ranks with one thread each."""
    options[option] = ranks
    return LLM("stories260k", threads=1, **options)


@pytest.mark.parametrize(
    ("option", "lost", "ranks"), [(TENSOR, 1, 2), (PIPELINE, 1, 2), (PIPELINE, 1, 3), (PIPELINE, 2, 3)]
)
def test_a_rank_that_is_killed_ends_the_engine(option: str, lost: int, ranks: int) -> None:
    llm = ranks_by(option, ranks, kv_cache_memory_bytes=1 << 22)
    assert llm._loaded._ranks is not None
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    os.kill(llm._loaded._ranks.processes[lost - 1].pid, signal.SIGKILL)
    reason = f"rank {lost} of {ranks} is lost, and the engine ends: its process was ended by SIGKILL"
    with pytest.raises(RankLostError, match=reason):
        list(stream)
    with pytest.raises(RankLostError, match=reason):  # nor is anything else served
        llm.generate("Once upon a time", SamplingParams(max_tokens=4))
    assert "SIGKILL" in llm._loaded.lost_rank


@pytest.mark.parametrize("option", [TENSOR, PIPELINE])
def test_a_rank_that_does_not_answer_is_lost(option: str) -> None:
    llm = ranks_by(option, 2, distributed_timeout_seconds=1)
    assert llm._loaded._ranks is not None
    os.kill(llm._loaded._ranks.processes[0].pid, signal.SIGSTOP)
    lost = r"rank 1 of 2 is lost.*it did not answer within 1 seconds \(distributed_timeout_seconds\)"
    with pytest.raises(RankLostError, match=lost):
        llm.generate("Once upon a time", SamplingParams(max_tokens=4))
    assert "it did not answer" in llm._loaded.lost_rank


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
            ResourceError,
            "^rank 1 cannot be started: Resource temporarily unavailable$",
        ),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (SystemExit(3), SystemExit, "^3$"),
    ],
)
def test_ranks_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, expected: type[BaseException], message: str
) -> None:
    def start(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("kvanta.engine.ranks.subprocess.Popen", start)
    with pytest.raises(expected, match=message):
        ranks_by(TENSOR, 2, kv_cache_memory_bytes=1 << 22)
