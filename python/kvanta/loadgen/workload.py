"""The workload: requests with their arrival times and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvanta.errors import InputError

MAX_TOKENS = 10_000_000
"""Limit of one prompt or one answer: a larger number is a damaged trace or a typing error."""
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True)
class PlannedRequest:
    """One request. Its prompt begins with the blocks of `blocks`, each of `block_tokens` tokens: equal ids anywhere in
    the workload are equal tokens, so a prefix cache can find them. The rest of the prompt is its own.
    """

    index: int
    arrival_s: float
    """After the start of the run."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival, and where they come from, as the report tells it."""

    requests: tuple[PlannedRequest, ...]
    source: dict[str, Any]

    @property
    def mean_rate(self) -> float:
        """Requests per second over the time of their arrivals; infinite if they all arrive at once."""
        span = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return (len(self.requests) - 1) / span if span > 0 else float("inf")

    def at_rate(self, rate: float) -> Workload:
        """The same requests, their arrivals stretched evenly until the mean rate is `rate` requests per second."""
        if self.mean_rate == rate:
            return self
        if self.mean_rate == float("inf"):
            raise InputError(
                f"all {len(self.requests)} requests arrive at one moment; none can be sent at a rate of {rate:g}"
            )
        return self.stretched(self.mean_rate / rate)

    def arriving(self, rate: float, burstiness: float, seed: int) -> Workload:
        """The same requests in the same order at other times, which are drawn as those of `synthetic`."""
        _check_arrivals(rate, burstiness, seed)
        times = arrival_times(len(self.requests), rate, burstiness, np.random.default_rng([seed, 1]))
        moved = tuple(replace(each, arrival_s=time) for each, time in zip(self.requests, times, strict=True))
        return Workload(moved, {**self.source, "burstiness": burstiness, "seed": seed})

    def stretched(self, factor: float) -> Workload:
        """The same requests, their arrival times multiplied by `factor`."""
        if not 0 <= factor < float("inf"):
            raise InputError(f"the time scale must be a number from 0 on, got {factor:g}")
        moved = tuple(replace(each, arrival_s=each.arrival_s * factor) for each in self.requests)
        return Workload(moved, self.source)


def arrival_times(count: int, rate: float, burstiness: float, random: np.random.Generator) -> list[float]:
    """Seconds, ascending from 0. Gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less
    comes in bursts, more is regular; an infinite rate sends everything at once.
    """
    if rate == float("inf"):
        return [0.0] * count
    gaps = random.gamma(burstiness, 1 / (rate * burstiness), size=count)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]]


def synthetic(
    *,
    requests: int,
    rate: float,
    burstiness: float,
    input_tokens: int,
    output_tokens: int,
    spread: float = 0.0,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Workload:
    """`requests` requests of about the same lengths, each uniform in (1 ± spread) of the one given.

    `shared_prefix`: tokens that all prompts have in common, followed by `input_tokens` that differ.
    """
    _check("requests", requests, 1, MAX_REQUESTS)
    _check("input tokens", input_tokens, 1, MAX_TOKENS)
    _check("output tokens", output_tokens, 1, MAX_TOKENS)
    _check("shared prefix", shared_prefix, 0, MAX_TOKENS)
    _check("spread", spread, 0.0, 1.0)
    _check_arrivals(rate, burstiness, seed)
    random = np.random.default_rng([seed, 1])
    times = arrival_times(requests, rate, burstiness, random)
    inputs, outputs = (_lengths(mean, spread, requests, random) for mean in (input_tokens, output_tokens))
    return Workload(
        tuple(
            PlannedRequest(
                index=index,
                arrival_s=times[index],
                input_tokens=shared_prefix + inputs[index],
                output_tokens=outputs[index],
                blocks=(0,) if shared_prefix else (),
                block_tokens=shared_prefix,
            )
            for index in range(requests)
        ),
        {
            "kind": "synthetic",
            "input_len": input_tokens,
            "output_len": output_tokens,
            "length_spread": spread,
            "shared_prefix_len": shared_prefix,
            "burstiness": burstiness,
            "seed": seed,
        },
    )


def _check_arrivals(rate: float, burstiness: float, seed: int) -> None:
    check_rate(rate)
    if not 0.01 <= burstiness <= 1000:
        raise InputError(f"the burstiness must be in 0.01..1000, got {burstiness:g}; 1 is a Poisson process")
    check_seed(seed)


def check_rate(rate: float) -> None:
    """Raises InputError unless it is a rate in requests per second; infinity is one."""
    if not rate > 0:
        raise InputError(f"the rate must be above 0, got {rate:g} requests per second; inf sends all at once")


def check_seed(seed: int) -> None:
    """Raises InputError unless it is a seed."""
    _check("seed", seed, 0, 2**63)


def _lengths(mean: int, spread: float, count: int, random: np.random.Generator) -> Sequence[int]:
    low, high = max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread)))
    return [int(length) for length in random.integers(low, high, size=count, endpoint=True)]


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InputError(f"{name}: {value} is not in {low:,}..{high:,}")
