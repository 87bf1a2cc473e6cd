"""JSON schemas before they become grammars: objects are closed.

A model that may add properties often does not end: vLLM's and SGLang's parsers allow none by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, ValuesView
from typing import Any

from kvanta.errors import InputError

_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # names -> schemas
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "if", "then", "else", "not", "propertyNames")
# Parts that describe the same value as the schema that has them, so that none may forbid the others' properties.
_COMBINED = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "$ref")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_NOT_STRICT = (*("not", "dependentRequired", "dependentSchemas", "if", "then", "else", "patternProperties"),)


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object that lists properties and does not say otherwise.

    Objects that several schemas describe together (allOf; properties next to $ref or anyOf) stay open, unless the one
    that has the parts lists every property of theirs.
    """
    closed: dict[str, Any] = _Closer(schema).close(schema, alone=True)
    return closed


class _Closer:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names: dict[int, set[str]] = {}  # by id of a schema: root keeps them alive
        self._shared: dict[int, Mapping[str, Any]] = {}
        """Schemas that must not be closed, because another one combines them with further ones."""
        for schema in _schemas(root):
            if self._combines_several(schema):
                for part in self._combined(schema):
                    self._add_behind(part, self._shared)

    def close(self, schema: Any, *, alone: bool) -> Any:
        """`alone`: no other schema describes the same value."""
        if not isinstance(schema, Mapping):
            return schema
        alone = alone and id(schema) not in self._shared
        closed: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _NAMED and isinstance(value, Mapping):
                closed[key] = {name: self.close(each, alone=key != "dependentSchemas") for name, each in value.items()}
            elif key in _LISTS and isinstance(value, list):
                closed[key] = [self.close(each, alone=alone or key == "prefixItems") for each in value]
            elif key in _SINGLE:
                closed[key] = self.close(value, alone=key in ("items", "additionalItems", "additionalProperties"))
            else:
                closed[key] = value
        properties = schema.get("properties")
        if (
            alone
            and isinstance(properties, Mapping)
            and not any(key in schema for key in _OPEN)
            and not any(name not in properties for name in schema.get("required") or ())
            and all(self._names_of(part) <= properties.keys() for part in self._combined(schema))
        ):
            closed["additionalProperties"] = False
        return closed

    @staticmethod
    def _combines_several(schema: Mapping[str, Any]) -> bool:
        if any(key in schema for key in ("properties", "if", "then", "else", "not", "dependentSchemas")):
            return True
        every = schema.get("allOf")
        return sum(key in schema for key in _COMBINED) > 1 or (isinstance(every, list) and len(every) > 1)

    def _combined(self, schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The parts of a schema that describe the same value, with what it refers to."""
        for key in _COMBINED:
            part = schema.get(key)
            if key == "$ref":
                part = referenced(self._root, part)
            several = part.values() if key == "dependentSchemas" and isinstance(part, Mapping) else part
            for each in several if isinstance(several, list | ValuesView) else [several]:
                if isinstance(each, Mapping):
                    yield each

    def _add_behind(self, schema: Mapping[str, Any], found: dict[int, Mapping[str, Any]]) -> None:
        """Adds a schema, and those that it combines or refers to, by id."""
        if id(schema) not in found:
            found[id(schema)] = schema
            for part in self._combined(schema):
                self._add_behind(part, found)

    def _names_of(self, schema: Mapping[str, Any]) -> set[str]:
        """Every property that a schema, or what it refers to, lists for the value itself."""
        names = self._names.get(id(schema))
        if names is None:
            found: dict[int, Mapping[str, Any]] = {}
            self._add_behind(schema, found)
            listed = (each["properties"] for each in found.values() if isinstance(each.get("properties"), Mapping))
            names = self._names[id(schema)] = {name for properties in listed for name in properties}
        return names


def referenced(root: Mapping[str, Any], reference: Any) -> Any:
    """The schema that a reference within the document points to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place


def with_parts(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The schema, with `change` of every schema directly within it."""
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            changed[key] = {name: change(each) for name, each in value.items()}
        elif (key in _LISTS or key in _SINGLE) and isinstance(value, list):
            changed[key] = [change(each) for each in value]
        else:
            changed[key] = change(value) if key in _SINGLE else value
    return changed


def rebased(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema as it must be written within another one, at the JSON pointer `place`: references count from the root.

    Raises InputError for schemas too deep to be read.
    """
    own = schema.get("$id")

    def move(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        moved = with_parts(part, move)
        moved.pop("$id", None)
        reference = moved.get("$ref")
        if isinstance(reference, str):
            if isinstance(own, str) and own:
                reference = reference.removeprefix(own)
            moved["$ref"] = place + reference[1:] if reference == "#" or reference.startswith("#/") else reference
        return moved

    try:
        result: dict[str, Any] = move(schema)
    except RecursionError:
        raise InputError("a JSON schema has more levels than are read") from None
    return result


def _schemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all within it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for _, part in _parts(schema):
        yield from _schemas(part)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas directly within one, each with its place."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        elif key in _LISTS and isinstance(value, list):
            yield from ((f"{key}.{index}", each) for index, each in enumerate(value))
        elif key in _SINGLE:
            yield key, value
