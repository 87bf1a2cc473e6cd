"""Allocation of formats to items with the least total cost within a budget of bits, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvanta.errors import InputError

_STEPS_PER_BIT = 64  # bits are counted in 64ths, rounded up: exact for the formats whose blocks divide 64 channels


@dataclass(frozen=True)
class Choice:
    """A format that an item may get."""

    name: str
    bits: float
    """Bits per element."""
    cost: float
    """Cost of the choice, in units that add up, such as nats."""


def allocate(items: Sequence[Sequence[Choice]], mean_bits: float) -> list[Choice]:
    """One choice per item, of equal sizes, of least cost and at most `mean_bits` on average; exact.

    Takes O(items * choices * items * mean_bits * 64) time. Raises InputError if even the smallest choices do not fit.
    """
    if math.isnan(mean_bits):
        raise InputError("a budget of bits per element must be a number, got nan")
    least, most = (sum(bound(map(_steps, item)) for item in items) for bound in (min, max))
    budget = math.floor(min(mean_bits * len(items) * _STEPS_PER_BIT + 1e-6, most))
    if least > budget:
        smallest = math.ceil(1000 * least / len(items) / _STEPS_PER_BIT) / 1000
        raise InputError(f"no scheme has {mean_bits:g} bits per element; the smallest has {smallest:g}")
    # best[b]: least cost of the items so far with b steps in all, at most.
    best = np.zeros(budget + 1)
    taken = []
    for item in items:
        after = np.full((len(item), budget + 1), np.inf)
        for row, choice in enumerate(item):
            steps = _steps(choice)
            if steps <= budget:
                after[row, steps:] = best[: budget + 1 - steps] + choice.cost
        taken.append(after.argmin(axis=0))
        best = after.min(axis=0)
    result = []
    left = budget
    for item, rows in zip(reversed(items), reversed(taken), strict=True):
        choice = item[int(rows[left])]
        result.append(choice)
        left -= _steps(choice)
    return result[::-1]


def _steps(choice: Choice) -> int:
    return math.ceil(choice.bits * _STEPS_PER_BIT - 1e-6)


def undominated(choices: Sequence[Choice]) -> list[Choice]:
    """The Pareto front in size and divergence, smallest first."""
    result: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bits, choice.cost)):
        if not result or choice.cost < result[-1].cost:
            result.append(choice)
    return result
