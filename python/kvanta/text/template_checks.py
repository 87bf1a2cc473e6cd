"""Estimates of what operators, filters and methods of a template make, before they make it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sized
from typing import Any

import jinja2

from kvanta.text.template_budget import ENTRY, allocate, text_length

_MOST_BITS = 2**16  # of a number
_MOST_WIDTH = 10_000  # of a column, an indentation, a group

# Widths of five digits, of an argument, or of another field's value: of the % operator, and of str.format.
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*\d*\.?(?:\d{5}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5}|\{)")


def size(value: object) -> int:
    """Characters of a text, or as many as a list or a dictionary is worth."""
    if isinstance(value, str):
        return len(value)
    return ENTRY * len(value) if isinstance(value, (list, tuple, Mapping)) else 0


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raises jinja2.TemplateError if the result would be too large; so do all checks here."""
    if operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) + _bits(right))
        elif isinstance(left, int) or isinstance(right, int):
            times, text = (left, right) if isinstance(left, int) else (right, left)
            allocate(size(text) * max(0, times))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) * max(0, right))
    elif isinstance(left, str):
        _check_format(left, right)


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise jinja2.TemplateError(f"it makes a number of more than {_MOST_BITS} bits")


def _check_format(layout: str, values: Any, wide: re.Pattern[str] = _WIDE_PERCENT) -> None:
    if wide.search(layout):
        raise jinja2.TemplateError("it formats a text with a width of five digits, or of another value")
    fields = layout.count("%" if wide is _WIDE_PERCENT else "{")
    allocate(len(layout) + fields * (text_length(values) + _MOST_WIDTH))


def _check_width(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MOST_WIDTH:
            raise jinja2.TemplateError(f"it uses a width of {value}; at most {_MOST_WIDTH} is allowed")


def _check_replacement(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str):
        allocate(len(text) + text.count(old) * text_length(new))


def _check_join(separator: Any, values: Any) -> None:
    entries = len(values) if hasattr(values, "__len__") else 0
    allocate(text_length(values) + entries * text_length(separator))


def _check_lines(text: Any, width: Any) -> None:
    """Every line, or every tab or character of it, grows."""
    _check_width(width)
    grows = width if isinstance(width, int) else text_length(width)
    if isinstance(text, str):
        allocate(len(text) + (text.count("\n") + text.count("\t") + 1) * max(0, grows))


def _check_translation(text: Any, table: Any) -> None:
    longest = max(map(text_length, table.values()), default=0) if isinstance(table, Mapping) else 1
    allocate(text_length(text) * max(1, longest))


def _whole(value: Any, *arguments: Any) -> None:
    _check_width(*arguments)
    allocate(text_length(value) + sum(map(text_length, arguments)))


def check_entries(value: Any, *_: Any) -> None:
    """The result is a list of the parts of a text, or of the entries of another collection."""
    if isinstance(value, Sized):
        allocate(ENTRY * len(value))


def check_same_size(value: Any, *_: Any) -> None:
    """The result is a text or a list as long as this one."""
    allocate(size(value))


def _groups(value: Any, *arguments: Any) -> None:
    """The entries in lists that are filled up to a width."""
    _check_width(*arguments)
    allocate(ENTRY * sum(each for each in arguments if isinstance(each, int)))
    check_entries(value)


def _padded(value: Any, *arguments: Any) -> None:
    _check_width(*arguments)
    allocate(text_length(value) + _MOST_WIDTH)


Check = Callable[..., None]


# check(value, *arguments), before a filter is applied or a method of a text is called.
def _to_json(value: Any, *_: Any, indent: int | None = 0) -> None:
    _check_width(indent)
    allocate(text_length(value) * (2 + (indent or 0)))


FILTERS: Mapping[str, Check] = {
    "batch": _groups,
    "capitalize": check_same_size,
    "center": _padded,
    "dictsort": check_entries,
    "escape": lambda value: allocate(6 * text_length(value)),
    "e": lambda value: allocate(6 * text_length(value)),
    "forceescape": lambda value: allocate(6 * text_length(value)),
    "format": lambda layout, *values: _check_format(str(layout), values),
    "groupby": check_entries,
    "indent": lambda value, width=4, *_: _check_lines(value, width),
    "join": lambda values, separator="", *_: _check_join(separator, values),
    "list": check_entries,
    "lower": check_same_size,
    "pprint": lambda value: allocate(4 * text_length(value)),
    "replace": lambda value, old="", new="", *_: _check_replacement(value, old, new),
    "reverse": check_same_size,
    "slice": _groups,
    "sort": check_entries,
    "string": _whole,
    "striptags": check_entries,
    "sum": lambda values, *_: allocate(text_length(values)),
    "title": check_entries,
    "tojson": _to_json,
    "trim": check_same_size,
    "upper": check_same_size,
    "urlencode": lambda value: allocate(6 * text_length(value)),
    "urlize": lambda value, *arguments: allocate(
        8 * (text_length(value) + 64) * (1 + sum(map(text_length, arguments)))
    ),
    "wordcount": check_entries,
    "wordwrap": lambda value, *arguments: allocate(text_length(value) * (2 + sum(map(text_length, arguments)))),
    "xmlattr": lambda value, *_: allocate(8 * text_length(value)),
}
METHODS: Mapping[str, Check] = {
    **dict.fromkeys(
        (
            *("capitalize", "casefold", "encode", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
            *("rpartition", "rstrip", "strip", "swapcase", "title", "upper"),
        ),
        check_same_size,
    ),
    "center": _padded,
    "expandtabs": lambda value, width=8: _check_lines(value, width),
    "format": lambda layout, *values: _check_format(layout, values, _WIDE_BRACES),
    "format_map": lambda layout, values: _check_format(layout, values, _WIDE_BRACES),
    "join": _check_join,
    "ljust": _padded,
    "replace": lambda value, old="", new="", *_: _check_replacement(value, old, new),
    "rjust": _padded,
    "rsplit": check_entries,
    "split": check_entries,
    "splitlines": check_entries,
    "translate": _check_translation,
    "zfill": _padded,
}


def apply_check(check: Check, value: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Runs the check of a filter or a method with the arguments of its call."""
    try:
        if named:
            indent = {"indent": named["indent"]} if check is _to_json and "indent" in named else {}
            others = [each for name, each in named.items() if name not in indent]
            check(value, *arguments, *others, **indent)
        else:
            check(value, *arguments)
    except TypeError:  # arguments that the filter refuses as well
        _whole(value, *arguments, *named.values())
