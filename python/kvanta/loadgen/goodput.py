"""Goodput: requests per second whose latencies meet all targets, in milliseconds or as multiples of the time alone.

As DistServe (OSDI 2024) and `vllm bench serve --goodput` define it. The target `itl` is of a request's largest gap: an
answer of a hundred tokens that stalls once would meet any target of a percentile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from kvanta.errors import InputError
from kvanta.loadgen.records import RequestRecord

TARGETS = ("ttft", "tpot", "e2e", "itl")
_OTHER_NAMES = {"e2el": "e2e"}
MAX_LENGTHS_ALONE = 5
"""Prompt lengths whose time alone is measured; those between them are interpolated."""
TOKENS_ALONE = 33
"""Tokens of an answer whose time alone is measured, at most."""


@dataclass(frozen=True)
class Target:
    """The maximum of one latency."""

    value: float
    """Milliseconds, or a multiple of the latency that a request alone has."""
    is_multiple: bool = False


def parse_targets(goodput: Sequence[str], slo: Sequence[str] = ()) -> dict[str, Target]:
    """Targets by name: `--goodput ttft:500 tpot:50` in milliseconds, `--slo ttft=1,itl=3x` in seconds or multiples."""
    targets: dict[str, Target] = {}

    def add(option: str, text: str, separator: str, unit: str, example: str) -> None:
        name, _, value = text.partition(separator)
        name = _OTHER_NAMES.get(name, name)
        if name not in TARGETS:
            raise InputError(f"the {option} target {text!r} names none of {', '.join(TARGETS)}; an example: {example}")
        if name in targets:
            raise InputError(f"the {option} target {name} is given twice")
        is_multiple = option == "SLO" and value.endswith("x")
        try:
            number = float(value.removesuffix("x") if is_multiple else value)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise InputError(f"the {option} target {text!r} has no number of {unit} above 0; an example: {example}")
        targets[name] = Target(number if is_multiple or option == "goodput" else 1000 * number, is_multiple)

    for text in goodput:
        add("goodput", text, ":", "milliseconds", "ttft:500")
    for text in (each for word in slo for each in word.split(",")):
        add("SLO", text, "=", "seconds, or of times alone with an x,", "ttft=1,itl=3x")
    return targets


@dataclass(frozen=True)
class AloneLatencies:
    """Latencies of one request on the idle server. Milliseconds."""

    input_tokens: int
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    """Median gap."""

    @classmethod
    def of(cls, record: RequestRecord) -> AloneLatencies:
        """Figures of a request that has succeeded."""
        gaps = record.gaps_s or [0.0]
        return cls(record.input_tokens, 1000 * record.ttft_s, 1000 * (record.tpot_s or 0.0), 1000 * median(gaps))


def lengths_alone(lengths: Sequence[int]) -> list[int]:
    """Prompt lengths to measure: the shortest, the longest, and quantiles of the different ones between them."""
    different = sorted(set(lengths))
    if len(different) <= MAX_LENGTHS_ALONE:
        return different
    last = len(different) - 1
    return [different[round(index * last / (MAX_LENGTHS_ALONE - 1))] for index in range(MAX_LENGTHS_ALONE)]


@dataclass(frozen=True)
class Goodput:
    """The targets of a run."""

    targets: Mapping[str, Target]
    alone: Sequence[AloneLatencies] = ()
    """Latencies by ascending length, at least one if a target is a multiple."""

    def figures(self, good: Sequence[RequestRecord], sent: int, seconds: float) -> dict[str, Any]:
        """`good`: the requests that have succeeded, of `sent` in `seconds`."""
        count = sum(map(self._meets, good))
        multiples = {name: target.value for name, target in self.targets.items() if target.is_multiple}
        return {
            "targets_ms": {name: target.value for name, target in self.targets.items() if not target.is_multiple},
            **({"targets_times_alone": multiples} if multiples else {}),
            "requests": count,
            "share": count / sent if sent else 0.0,
            "request_throughput": count / seconds,
        }

    def _meets(self, record: RequestRecord) -> bool:
        measured = {
            "ttft": 1000 * record.ttft_s,
            "tpot": 1000 * (record.tpot_s or 0.0),
            "itl": 1000 * max(record.gaps_s, default=0.0),
            "e2e": 1000 * record.e2e_s,
        }
        return all(measured[name] <= self._most(name, target, record) for name, target in self.targets.items())

    def _most(self, name: str, target: Target, record: RequestRecord) -> float:
        """Milliseconds."""
        if not target.is_multiple:
            return target.value
        ttft, tpot, itl = (self._alone(f"{each}_ms", record.input_tokens) for each in ("ttft", "tpot", "itl"))
        e2e = ttft + tpot * (record.output_tokens - 1)
        return target.value * {"ttft": ttft, "tpot": tpot, "itl": itl, "e2e": e2e}[name]

    def _alone(self, latency: str, input_tokens: int) -> float:
        lengths = [each.input_tokens for each in self.alone]
        return float(np.interp(input_tokens, lengths, [getattr(each, latency) for each in self.alone]))
