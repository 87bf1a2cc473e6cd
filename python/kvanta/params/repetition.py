"""Ends a text that repeats itself: `repetition_detection` of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvanta.errors import InputError
from kvanta.params.checks import one_line, whole_number

MAX_PATTERN = 4096
_NAMES = ("max_pattern_size", "min_pattern_size", "min_count")


@dataclass(kw_only=True)
class RepetitionDetectionParams:
    """A text ends when its last tokens are the same min_count times in a row. Raises InputError."""

    max_pattern_size: int = 0
    """Largest number of tokens that are repeated; 0: the text may repeat itself."""
    min_pattern_size: int = 0
    """The smallest; 0: one."""
    min_count: int = 0
    """At least 2."""

    def __post_init__(self) -> None:
        """Checks the ranges."""
        most = self.max_pattern_size = whole_number("max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN)
        self.min_pattern_size = whole_number("min_pattern_size", self.min_pattern_size, 0, most)
        self.min_count = whole_number("min_count", self.min_count, 2 if most else 0, 2**31 - 1)

    @classmethod
    def read(cls, value: Any) -> RepetitionDetectionParams:
        """From an object of a request, or from vLLM's class."""
        if isinstance(value, Mapping):
            unknown = sorted(map(str, value.keys() - {*_NAMES}))
            if unknown:
                raise InputError(f"{one_line(unknown[0])} is unknown; known: {', '.join(_NAMES)}")
            return cls(**value)
        if not all(hasattr(value, name) for name in _NAMES):
            raise InputError(f"an object with {', '.join(_NAMES)} is needed, got {one_line(value)}")
        return cls(**{name: getattr(value, name) for name in _NAMES})


class RepetitionDetector:
    """One text. A token costs the same however long the text is."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        smallest = max(1, params.min_pattern_size)
        self._sizes = np.arange(smallest, params.max_pattern_size + 1)
        self._needed = self._sizes * (params.min_count - 1)
        self._equal = np.zeros(len(self._sizes), dtype=np.int64)
        """Number, by size, of last tokens that equal the token this far before them."""
        self._recent = np.full(params.max_pattern_size + 1, -1, dtype=np.int64)
        """The last tokens, the newest last."""

    def add(self, token: int) -> bool:
        """True when the text repeats itself with this token."""
        if not len(self._sizes):
            return False
        self._recent[:-1] = self._recent[1:]
        self._recent[-1] = token
        self._equal += 1
        self._equal[self._recent[-1 - self._sizes] != token] = 0
        return bool((self._equal >= self._needed).any())
