"""Traces that benchmarks/make_traces.py writes, as `kvanta bench serve --trace` reads them."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kvanta.loadgen.traces import read_trace
from kvanta.loadgen.workload import Workload

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "make_traces.py"


def made(folder: Path, mix: str, *words: str) -> Workload:
    file = folder / f"{mix}.jsonl"
    command = [sys.executable, str(SCRIPT), mix, "--sessions", "12", "--out", str(file), *words]
    subprocess.run(command, check=True)
    return read_trace(file)


@pytest.mark.parametrize(("mix", "shared"), [("chat", 0), ("agents", 8)])
def test_turns_repeat_their_session_and_agents_a_prefix(tmp_path: Path, mix: str, shared: int) -> None:
    trace = made(tmp_path, mix)
    assert trace.source["kind"] == "mooncake"
    assert len(trace.requests) > 12
    assert all(each.blocks[:shared] == tuple(range(shared)) for each in trace.requests)
    sessions: dict[int, list[tuple[int, ...]]] = {}
    for request in trace.requests:
        assert len(request.blocks) == request.input_tokens // 512
        own = request.blocks[shared:]
        if own:
            sessions.setdefault(own[0] >> 20, []).append(own)
    assert len(sessions) > 3
    turns = [pair for prompts in sessions.values() for pair in pairwise(prompts)]
    assert turns
    assert all(later[: len(earlier)] == earlier for earlier, later in turns)


def test_the_seed_decides(tmp_path: Path) -> None:
    assert made(tmp_path, "chat") == made(tmp_path, "chat") != made(tmp_path, "chat", "--seed", "1")
