"""Texts with tagged parts: any text until a tag's trigger comes, then the tag's parts, then any text again.

Calls of functions are such parts, which a model may write or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line, text, truth

MAX_CALLS = 32
"""Calls of an answer that must be calls: a weak model would repeat them for ever."""
_MAX_TAGS = 1024
_JSON = "{'structures': [{'begin': ..., 'schema': {...}, 'end': ...}], 'triggers': [...]}"


@dataclass(frozen=True)
class Json:
    """A part of a tag: JSON of this schema."""

    schema: str | Mapping[str, Any]


@dataclass(frozen=True)
class TextUntil:
    """A part of a tag: any text, and the mark that ends it."""

    mark: str
    plain: bool = False
    """No special tokens stand in the text."""


@dataclass(frozen=True)
class OneOf:
    """A part of a tag: one of these texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class ListOf:
    """A part of a tag: entries of these parts in brackets, with commas between, or none."""

    entry: Sequence[Part]


@dataclass(frozen=True)
class Choice:
    """A part of a tag: the parts of one of these."""

    choices: Sequence[Sequence[Part]]


@dataclass(frozen=True)
class Maybe:
    """A part of a tag: these parts, or nothing."""

    parts: Sequence[Part]


Part = str | Json | TextUntil | OneOf | ListOf | Choice | Maybe


@dataclass(frozen=True)
class Tag:
    """The parts that follow `trigger`; where tags have the same trigger, one of them follows."""

    trigger: str
    parts: Sequence[Part]
    alone: bool = False
    """The trigger is recognized only at the beginning of the text and directly after another tag."""


@dataclass(frozen=True)
class StructuralTag:
    """The tags of a text. With `at_least_one` the text has one or more."""

    tags: Sequence[Tag]
    at_least_one: bool = False
    instead: Json | None = None
    """The whole of a text that has no tags; then a text with tags has nothing else."""
    at_most_one: bool = False
    section: tuple[str, str] = ("", "")
    """Marks that may stand around all tags of a text with `instead`."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _schema: Any, _handler: Any) -> dict[str, Any]:
        """The server's document has the JSON that `read` takes."""
        return {"type": "object"}

    @property
    def schemas(self) -> list[str | Mapping[str, Any]]:
        """The JSON schemas of all parts."""
        waiting: list[Part] = [part for tag in self.tags for part in tag.parts]
        waiting += [self.instead] if self.instead else []
        found = []
        while waiting:
            match waiting.pop():
                case Json(schema):
                    found.append(schema)
                case ListOf(parts) | Maybe(parts):
                    waiting += parts
                case Choice(choices):
                    waiting += [part for parts in choices for part in parts]
        return found

    @classmethod
    def read(cls, given: Any) -> StructuralTag:
        """From the JSON that vLLM and SGLang have for it. Raises InputError."""
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise InputError(f"structural_tag must be JSON, got {one_line(given)}") from None
        if not isinstance(given, Mapping) or not all(_is_list(given.get(name)) for name in ("structures", "triggers")):
            raise InputError(f"structural_tag must be {_JSON} with at most {_MAX_TAGS} of each, got {one_line(given)}")
        structures = given["structures"]
        starts = [text("structural_tag.triggers", trigger) for trigger in given["triggers"]]
        tags = [_tag(f"structural_tag.structures[{index}]", each, starts) for index, each in enumerate(structures)]
        return cls(tags, truth("structural_tag.at_least_one", given.get("at_least_one") or False))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= _MAX_TAGS


def _tag(where: str, given: Any, triggers: Sequence[str]) -> Tag:
    begin = given.get("begin") if isinstance(given, Mapping) else None
    schema = given.get("schema", {}) if isinstance(given, Mapping) else None
    if not isinstance(begin, str) or not isinstance(schema, Mapping):
        raise InputError(f"{where} must have a begin and a schema, got {one_line(given)}")
    trigger = next((each for each in triggers if each and begin.startswith(each)), None)
    if trigger is None:
        raise InputError(f"{where}.begin is {one_line(begin)}, which begins with none of the triggers")
    return Tag(trigger, (begin[len(trigger) :], Json(schema), text(f"{where}.end", given.get("end", ""))))
