"""Checks of single values that users pass: what is not of the wanted type is an InputError that names it."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from kvanta.errors import InputError


def one_line(value: object, most: int = 60) -> str:
    """The beginning of repr(value), in one line."""
    try:
        shown = repr(value)
    except RecursionError:  # JSON may be nested as deeply as it could just be read
        shown = f"a deeply nested {type(value).__name__}"
    return " ".join(shown.split())[:most]


def text(name: str, value: Any) -> str:
    """A text that UTF-8 can hold, as the C++ library wants it."""
    if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{name} is {one_line(value)}, not a text of valid Unicode")
    return value


def truth(name: str, value: Any) -> bool:
    """True or False, numpy's included; not "false", which Python takes for true."""
    if not isinstance(value, (bool, np.bool_)):
        raise InputError(f"{name} is {one_line(value)}, not True or False")
    return bool(value)


def whole_number(name: str, value: Any, low: int, high: int, otherwise: str = "") -> int:
    """A whole number in low..high, numpy's included. `otherwise`: what else is allowed, for the message."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InputError(f"{name} is {one_line(value)}, not a whole number in {low}..{high}{otherwise}")
    return number


def real_number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `open_below`; numpy's included."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:  # a whole number beyond every float
        number = math.inf
    if not (math.isfinite(number) and low <= number <= high and not (open_below and number == low)):
        bracket = "(" if open_below else "["
        raise InputError(f"{name} is {one_line(value)}, not a number in {bracket}{low:g}, {high:g}]")
    return number
