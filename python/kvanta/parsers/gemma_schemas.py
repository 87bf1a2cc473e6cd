"""A function's schema as the parts of a call in Gemma 4's syntax, which gemma_calls.py reads.

What that syntax cannot say exactly (patterns, numbers of entries, schemas within themselves) is JSON there, which the
reader takes as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvanta.constraints.json_schema import referenced
from kvanta.params.structural_tag import Choice, Json, ListOf, OneOf, Part, TextUntil
from kvanta.parsers.lenient_json import QUOTE, types_of

_NEUTRAL_KEYS = {"type", "title", "description", "default", "examples", "$defs", "definitions", "$schema", "$comment"}
"""Keys that do not narrow what a type allows."""
_BARE_KEY = re.compile(r"[\w.$-]+")
_DEFINITIONS = ("#/$defs/", "#/definitions/")
_MAX_PARTS = 1000


def gemma_arguments(schema: Mapping[str, Any]) -> list[Part]:
    """The object of arguments. JSON as a whole where references lead outside of a part of the schema."""
    if all(reference.startswith(_DEFINITIONS) for reference in _references(schema)):
        return _Writer(schema).value(schema, frozenset())
    return [Json(schema)]


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield str(schema["$ref"])
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _references(each)


class _Writer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self._parts = 0

    def value(self, schema: Any, path: frozenset[str]) -> list[Part]:
        """The parts of a value. `path`: references that are being followed."""
        self._parts += 1
        given, steps = schema, path
        while isinstance(given, Mapping) and "$ref" in given:
            reference = str(given["$ref"])
            if reference in steps or given.keys() - _NEUTRAL_KEYS != {"$ref"}:
                return [self._json(schema)]
            given, steps = referenced(self._root, reference), steps | {reference}
        if not isinstance(given, Mapping) or self._parts > _MAX_PARTS:
            return [self._json(schema)]
        return self._choices(given, steps) or self._typed(given, steps) or [self._json(schema)]

    def _json(self, schema: Any) -> Json:
        return Json({**schema, **self._definitions} if isinstance(schema, Mapping) else schema)

    def _choices(self, schema: Mapping[str, Any], path: frozenset[str]) -> list[Part] | None:
        """One of several values, schemas or types; None for all else."""
        keys = schema.keys() - _NEUTRAL_KEYS
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if keys in ({"const"}, {"enum"}) and isinstance(values, list) and values and all(map(_is_plain, values)):
            return [OneOf([_literal(value) for value in values])]
        for key in ("anyOf", "oneOf"):
            if keys == {key} and "type" not in schema and isinstance(schema[key], list) and schema[key]:
                return [Choice([self.value(each, path) for each in schema[key]])]
        kinds = schema.get("type")
        if isinstance(kinds, list) and len(kinds) > 1 and all(isinstance(kind, str) for kind in kinds):
            return [Choice([self.value({**schema, "type": kind}, path) for kind in kinds])]
        return None

    def _typed(self, schema: Mapping[str, Any], path: frozenset[str]) -> list[Part] | None:
        """A text, a list or an object that the syntax can say; None for all else."""
        kinds = types_of(schema) or ({"object"} if "properties" in schema else set())
        keys = schema.keys() - _NEUTRAL_KEYS
        if kinds == {"string"} and not keys:
            return [QUOTE, TextUntil(QUOTE, plain=True)]
        if kinds == {"array"} and keys == {"items"}:
            return [ListOf(self.value(schema["items"], path))]
        properties = schema.get("properties", {})
        if kinds != {"object"} or not keys <= {"properties", "required", "additionalProperties"}:
            return None
        if schema.get("additionalProperties") is not False or not isinstance(properties, Mapping):
            return None
        required = schema.get("required", [])
        if (
            not isinstance(required, list)
            or set(map(str, required)) != set(properties)
            or any(map(_has_mark, properties))
        ):
            return None
        pairs: list[Part] = ["{"]
        for key in sorted(properties, key=str.lower):  # as Gemma's template writes them
            name = key if _BARE_KEY.fullmatch(key) else f"{QUOTE}{key}{QUOTE}"
            pairs += [f"{',' if len(pairs) > 1 else ''}{name}:", *self.value(properties[key], path)]
        return [*pairs, "}"]


def _has_mark(text: str) -> bool:
    return "<|" in text or "|>" in text


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (list, dict)) and not (isinstance(value, str) and _has_mark(value))


def _literal(value: Any) -> str:
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
