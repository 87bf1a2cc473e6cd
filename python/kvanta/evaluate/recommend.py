"""--recommend "kl_mean<0.005,top1>0.97": the smallest format that holds every condition."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError

_KL = ("kl_mean", "kl_median", "kl_p99", "kl_max")
FIGURES = (*_KL, "top1", "ppl", "ppl_ratio", "needle", "saturated", "bits_per_element", "bytes_per_token")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"\s*([a-z_0-9]+)\s*(<=|>=|<|>)\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*")


@dataclass(frozen=True)
class Condition:
    """One figure and its bound."""

    figure: str
    sign: str
    bound: float

    def holds(self, row: Mapping[str, Any]) -> bool:
        """True if a format's figures keep the limit; a missing figure does not."""
        value = row.get(self.figure)
        return value is not None and _OPERATORS[self.sign](value, self.bound)


def parse_conditions(text: str) -> list[Condition]:
    """From "kl_mean<0.005" or several, separated by commas. Raises InputError."""
    conditions = []
    for part in text.split(","):
        match = _CONDITION.fullmatch(part)
        try:
            bound = float(match[3]) if match else 0.0
        except ValueError:  # "1.2.3"
            match = None
        if match is None:
            raise InputError(f"recommend: {part.strip()!r} is not FIGURE<NUMBER, as in kl_mean<0.005")
        if match[1] not in FIGURES:
            raise InputError(f"recommend: unknown figure {match[1]!r}; known: {', '.join(FIGURES)}")
        conditions.append(Condition(match[1], match[2], bound))
    return conditions


def recommend(formats: Mapping[str, Mapping[str, Any]], conditions: list[Condition]) -> str | None:
    """The name with the fewest bytes per token, then the least KL, that holds all conditions; None if none does."""
    fit = [name for name, row in formats.items() if all(condition.holds(row) for condition in conditions)]
    return min(fit, key=lambda name: (formats[name]["bytes_per_token"], formats[name].get("kl_mean", 0)), default=None)
