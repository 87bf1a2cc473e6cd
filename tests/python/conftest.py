"""Set-up of all tests: imports from other folders, Ctrl-C, Ray's priority, the shipped model."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from model_support import RecordSupport, recorder
from stories import GREEDY, PROMPT

from kvanta import LLM

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("tests/oracle", "tools", "benchmarks")]

# A run in the background inherits interrupts that are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Ray lowers the priority of its workers, which would get next to no CPU beside other tests.
os.environ.setdefault("RAY_worker_niceness", "0")

# The models of torch are so small that its threads do little but wait, the longer the more tests run beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories260k", kv_cache_memory_bytes="32MiB", threads=1)


@pytest.fixture(scope="module")
def story(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids


@pytest.fixture
def record_support(request: pytest.FixtureRequest) -> RecordSupport:
    return recorder(request.node.user_properties)
