"""Traces for `kvanta bench serve --trace`, in Mooncake's format: conversations of people, or agents that call tools.

    python benchmarks/make_traces.py chat --sessions 40 --minutes 10 --out chat.jsonl
    python benchmarks/make_traces.py agents --sessions 20 --minutes 10 --out agents.jsonl

Sessions begin at random times within --minutes. Every turn sends what the session has so far and a new message, and
waits for the answer and a pause before the next one. Lengths are log-normal, with the medians of KINDS: those of chats
are about ShareGPT's. `hash_ids` has the full blocks of 512 tokens that a prompt shares with the turns before, and, for
agents, with all other sessions: a system prompt of 4,096 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvanta.loadgen.traces import MOONCAKE_BLOCK

_SIGMA = 0.9
"""Standard deviation of the logarithms of lengths: the 95th percentile is 4.4 times the median."""


@dataclass(frozen=True)
class SessionKind:
    """Sessions of one kind. Lengths are medians in tokens."""

    system: int
    """Tokens that all sessions begin with."""
    message: int
    answer: int
    turns: int
    """Mean number of turns of a session, at least one."""
    pause_s: float
    """Mean time from an answer to the next message."""
    max_tokens: int
    """A session ends before a prompt gets longer."""


KINDS = {
    "chat": SessionKind(system=0, message=60, answer=180, turns=4, pause_s=20.0, max_tokens=8192),
    "agents": SessionKind(system=4096, message=300, answer=60, turns=8, pause_s=2.0, max_tokens=16384),
}
_ANSWER_SECONDS_PER_TOKEN = 0.05
"""Assumed for the time of the next turn, which a trace fixes in advance."""


def session(kind: SessionKind, number: int, begin_s: float, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    """Requests of one session."""

    def length(middle: int) -> int:
        return max(1, round(middle * float(np.exp(_SIGMA * random.standard_normal()))))

    shared = kind.system // MOONCAKE_BLOCK
    time_s, history = begin_s, kind.system
    for _ in range(int(random.geometric(1 / kind.turns))):
        prompt, answer = history + length(kind.message), length(kind.answer)
        if prompt > kind.max_tokens:
            return
        blocks = range(prompt // MOONCAKE_BLOCK)
        yield {
            "timestamp": round(1000 * time_s),
            "input_length": prompt,
            "output_length": answer,
            "hash_ids": [block if block < shared else ((number + 1) << 20) + block for block in blocks],
        }
        history = prompt + answer
        time_s += answer * _ANSWER_SECONDS_PER_TOKEN + float(random.exponential(kind.pause_s))


def trace(kind: SessionKind, sessions: int, seconds: float, seed: int) -> list[dict[str, Any]]:
    """All requests by time."""
    random = np.random.default_rng(seed)
    begins = np.sort(random.uniform(0, seconds, size=sessions))
    rows = [row for number, begin in enumerate(begins) for row in session(kind, number, float(begin), random)]
    return sorted(rows, key=lambda row: int(row["timestamp"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="[standard output]")
    options = parser.parse_args()
    rows = trace(KINDS[options.kind], options.sessions, 60 * options.minutes, options.seed)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
