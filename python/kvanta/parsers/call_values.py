"""The JSON values of a text in which calls were found."""

from __future__ import annotations

import json
from typing import Any

from kvanta.parsers.lenient_json import JSON_READER, LenientJson

_MAX_REPAIRED = 64
"""Values of one text."""


def values_of(text: str) -> list[Any]:
    """The JSON values of a text, lists taken apart; none if it has anything else."""
    at, values = 0, []
    text = text.strip()
    try:
        while at < len(text):
            value, at = JSON_READER.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
            while at < len(text) and text[at] in "; \n\r\t":
                at += 1
    except (ValueError, RecursionError):
        return []
    return values


def repaired_values(text: str, *, complete: bool) -> list[Any]:
    """The meaning of a text that is close to JSON. `complete`: an end that is missing was forgotten, not cut off."""
    values: list[Any] = []
    try:
        for _ in range(_MAX_REPAIRED):
            reader = LenientJson()
            written = reader.take(text)
            if not reader.ended and complete:
                written += reader.take("", final=True)
            if not reader.ended:
                break
            value = JSON_READER.decode(written)
            values += value if isinstance(value, list) else [value]
            text = reader.rest
    except (ValueError, RecursionError):
        return []
    return values


def list_values(text: str) -> list[Any]:
    """The values of a JSON list that are complete."""
    values: list[Any] = []
    at = len(text) - len(text.lstrip().removeprefix("["))
    while True:
        while at < len(text) and text[at] in ", \n\r\t":
            at += 1
        if at == len(text) or text[at] == "]":
            return values
        try:
            value, at = JSON_READER.raw_decode(text, at)
        except json.JSONDecodeError:
            return values
        except (ValueError, RecursionError):  # a number that no JSON can have: all of it stays text
            return []
        values.append(value)
