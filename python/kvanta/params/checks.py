"""Checks of single values from users; each raises an InputError that names the value, and whose field is its name."""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvanta.errors import InputError


def one_line(value: object, limit: int = 60) -> str:
    """The first `limit` characters of repr(value), on one line."""
    try:
        shown = repr(_beginning(value, limit))
    except RecursionError:  # JSON nested almost too deeply to be parsed
        shown = f"a deeply nested {type(value).__name__}"
    return " ".join(shown.split())[:limit]


def _beginning(value: object, limit: int) -> object:
    """Enough of a value for that many characters of its repr: a request's may have millions."""
    if isinstance(value, str):
        return value[: limit + 1]
    if type(value) in (list, tuple) and len(value) > 0:  # type: ignore[arg-type]
        return type(value)(_beginning(each, limit) for each in value[: limit // 2 + 1])  # type: ignore
    if type(value) is dict:
        entries = itertools.islice(value.items(), limit // 4 + 1)
        return {_beginning(key, limit): _beginning(each, limit) for key, each in entries}
    return value


def text(name: str, value: Any) -> str:
    """A text that UTF-8 can encode, for the C++ library."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        pass
    raise InputError(f"{name} must be a text of valid Unicode, got {one_line(value)}", name)


def truth(name: str, value: Any) -> bool:
    """True or False, numpy's included; not "false", which is true in Python."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name} must be True or False, got {one_line(value)}", name)
    return bool(value)


def switch(name: str, value: Any) -> bool:
    """True or False, which a request may have as the text "true" or "false", too."""
    words = {"true": True, "false": False}
    return truth(name, words.get(value.lower(), value) if isinstance(value, str) else value)


def whole_number(name: str, value: Any, low: int, high: int, otherwise: str = "") -> int:
    """An integer in low..high, numpy's included. `otherwise`: further values, for the message."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InputError(f"{name} must be a whole number in {low}..{high}{otherwise}, got {one_line(value)}", name)
    return number


def real_number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `open_below`; numpy's included."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high and not (open_below and number == low)):
        begin, end = "(" if open_below else "[", "]" if math.isfinite(high) else ")"
        raise InputError(f"{name} must be a number in {begin}{low:g}, {high:g}{end}, got {one_line(value)}", name)
    return number


def each_of(name: str, values: Any, kind: str) -> list[Any]:
    """The entries of a list, tuple or array; not the letters of a text. `kind`: of the entries, for the message."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InputError(f"{name} must be a list of {kind}, got {one_line(values)}", name)
    return list(values)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message: "; did you mean X?", or nothing when no name is similar, dashes before names aside."""
    names = {each.lstrip("-"): each for each in known}
    matches = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=0.7)
    return f"; did you mean {names[matches[0]]}?" if matches else ""
