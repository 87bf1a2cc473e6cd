"""Schemas that client libraries generate, as far as a grammar can hold a text to them.

What it cannot hold (a set's unique items, look-ahead) is taken out of the schema, and named. Every text of the schema
matches what is left; `null` for a keyword that has no value, and a `format` that no standard lists, mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvanta.constraints.json_schema import referenced, with_parts
from kvanta.errors import InputError

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that the grammar knows."""
_STANDARD_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer"),
        *("uri-reference", "uri-template"),
    )
)
_NOT_HELD = (
    *("$dynamicRef", "$recursiveRef", "contains", "minContains", "maxContains", "dependencies", "dependentRequired"),
    *("dependentSchemas", "else", "if", "not", "then", "unevaluatedItems"),
)
_VALUES = ("const", "default", "example")
"""Keywords for which null is a value."""
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "contains": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": (True, {}),
    "not": (False,),
    "then": (True, {}),
    "unevaluatedItems": (True, {}),
}
"""Values that forbid nothing."""
_MARKS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|\((?:\?<?[=!])?|\)", re.DOTALL)
"""Parts of a regular expression: escapes, classes, the beginnings of groups and of look-around, ends of groups."""
_ESCAPES = {"\\A": "^", "\\Z": "$", "\\z": "$", "\\b": "", "\\B": "", "\\G": ""}
_REFERENCE = re.compile(r"\\[1-9k]")
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_MAX_BRANCHES = 64


def loosened(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schema that a grammar can hold, and the keywords, in order, of which it holds a part or nothing.

    Raises InputError for schemas too deep to be read.
    """
    loosener = _Loosener(schema)
    try:
        result: dict[str, Any] = loosener.loosen(schema)
    except RecursionError:
        raise InputError("a JSON schema has more levels than are read") from None
    return result, sorted(loosener.lost)


def loosened_keywords(schemas: Iterable[str | Mapping[str, Any]]) -> list[str]:
    """The keywords of these schemas of which a grammar holds a part or nothing; none for a text that is no schema."""
    found: set[str] = set()
    for schema in schemas:
        with contextlib.suppress(ValueError, RecursionError):
            given = json.loads(schema) if isinstance(schema, str) else schema
            found.update(loosened(given)[1] if isinstance(given, Mapping) else ())
    return sorted(found)


class _Loosener:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self.lost: set[str] = set()

    def loosen(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if schema.get("not") in ({}, True) and "not" in schema:  # never()
            return False
        given = {key: value for key, value in schema.items() if value is not None or key in _VALUES}
        if "oneOf" in given and not self._exclusive(given):
            self.lost.add("oneOf")
        self._drop(given)
        self._type(given)
        self._text(given)
        self._items(given)
        self._properties(given)
        return with_parts(given, self.loosen)

    def _drop(self, given: dict[str, Any]) -> None:
        for key in _NOT_HELD:
            if key in given and given.pop(key) not in _NEUTRAL.get(key, ()):
                self.lost.add(key)
        if "json-schema.org" not in str(given.get("$schema", "json-schema.org")):
            del given["$schema"]

    def _type(self, given: dict[str, Any]) -> None:
        """Names of types in capitals, as in OpenAPI's dialect of some services."""
        kinds = given.get("type")
        if isinstance(kinds, str) and kinds.isupper():
            given["type"] = kinds.lower()
        if given.get("type") == "any":
            del given["type"]

    def _text(self, given: dict[str, Any]) -> None:
        form = given.get("format")
        if form is not None and form not in _FORMATS:
            del given["format"]
            if form in _STANDARD_FORMATS:
                self.lost.add("format")
        pattern = given.get("pattern")
        if isinstance(pattern, str):
            held = self._pattern(pattern)
            given.pop("pattern")
            if held is not None:
                given["pattern"] = held

    def _pattern(self, pattern: str) -> str | None:
        """A pattern that matches every text that this one does; None: any text."""
        held, exact = _held_pattern(pattern)
        if not exact:
            self.lost.add("pattern")
        return held

    def _items(self, given: dict[str, Any]) -> None:
        """The number of different items is at most that of the values that an item may have."""
        if given.pop("uniqueItems", False) is not True:
            return
        self.lost.add("uniqueItems")
        items = given.get("items")
        items = self._resolved(items) if isinstance(items, Mapping) else {}
        values = items.get("enum")
        if isinstance(values, list) and values and "prefixItems" not in given:
            most = given.get("maxItems")
            given["maxItems"] = min(most, len(values)) if isinstance(most, int) else len(values)

    def _properties(self, given: dict[str, Any]) -> None:
        further = given.pop("unevaluatedProperties", None)
        if further is not None and "additionalProperties" not in given:
            if further is not False:
                given["additionalProperties"] = further
            elif any(key in given for key in ("allOf", "anyOf", "oneOf", "$ref")):
                self.lost.add("unevaluatedProperties")
        self._names(given)
        patterns = given.get("patternProperties")
        if isinstance(patterns, Mapping):
            held = {pattern: self._pattern(pattern) for pattern in patterns}
            given["patternProperties"] = {held[each] or "": schema for each, schema in patterns.items()}
        properties, required = given.get("properties"), given.get("required")
        if isinstance(properties, Mapping) and not (
            isinstance(required, list) and all(name in required for name in properties)
        ):
            for key in ("minProperties", "maxProperties"):
                if given.pop(key, 0) not in (0, len(properties) if key == "maxProperties" else 0):
                    self.lost.add(key)

    def _names(self, given: dict[str, Any]) -> None:
        """`propertyNames` as the properties themselves, or as their pattern."""
        names = given.pop("propertyNames", None)
        if not isinstance(names, Mapping):
            return
        names = self._resolved(names)
        keys = names.keys() - {"type", "title", "description"}
        if not keys:
            return
        further = given.get("additionalProperties", True)
        own = any(key in given for key in ("properties", "patternProperties"))
        if keys == {"enum"} and isinstance(names["enum"], list) and not own:
            given["properties"] = {str(name): further for name in names["enum"]}
            given["additionalProperties"] = False
        elif keys == {"pattern"} and isinstance(names["pattern"], str) and not own:
            given["patternProperties"] = {names["pattern"]: further}
            given["additionalProperties"] = False
        else:
            self.lost.add("propertyNames")

    def _exclusive(self, given: Mapping[str, Any]) -> bool:
        """No value matches two branches of `oneOf`: then anyOf is the same."""
        if "discriminator" in given:
            return True
        branches = given["oneOf"]
        if not isinstance(branches, list) or not all(isinstance(each, Mapping) for each in branches):
            return False
        resolved = [self._resolved(each) for each in branches[: _MAX_BRANCHES + 1]]
        return len(resolved) <= _MAX_BRANCHES and all(
            _differ(left, right) for index, left in enumerate(resolved) for right in resolved[:index]
        )

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        seen: set[str] = set()
        while isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            seen.add(reference)
            found = referenced(self._root, reference)
            if not isinstance(found, Mapping):
                break
            schema = found
        return schema


def _differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """No value matches both: types, constants, or what an object must or may have differ."""
    kinds, others = _kinds(left), _kinds(right)
    if kinds and others and not kinds & others:
        return True
    values, other_values = _values(left), _values(right)
    if values is not None and other_values is not None:
        return not any(value in other_values for value in values)
    if not (kinds == others == {"object"}):
        return False
    for one, other in ((left, right), (right, left)):
        closed = other.get("additionalProperties") is False and "patternProperties" not in other
        if closed and any(name not in (other.get("properties") or {}) for name in one.get("required") or ()):
            return True
    common = {name for name in left.get("required") or () if name in (right.get("required") or ())}
    return any(
        (mine := _values((left.get("properties") or {}).get(name))) is not None
        and (theirs := _values((right.get("properties") or {}).get(name))) is not None
        and not any(value in theirs for value in mine)
        for name in common
    )


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type")
    names = {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds} if isinstance(kinds, list) else set()
    return {"number" if name == "integer" else name for name in names}


def _values(schema: Any) -> list[Any] | None:
    """All values that a schema allows, if it lists them."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


@functools.lru_cache(1024)
def _held_pattern(pattern: str) -> tuple[str | None, bool]:
    """The pattern without what the grammar's syntax lacks, which matches at least the same texts, and whether it
    matches exactly those. None: any text.
    """
    kept: list[str] = []
    exact = True
    depth, skipped, at = 0, 0, 0  # `skipped`: depth of the look-around that is left out
    for mark in _MARKS.finditer(pattern):
        instead: str | None = None
        end = mark.end()
        if mark[0].startswith("("):
            depth += 1
            if not skipped and len(mark[0]) > 1:
                skipped, instead = depth, ""
        elif mark[0] == ")":
            depth -= 1
            if skipped == depth + 1:
                quantifier = _QUANTIFIER.match(pattern, end)
                skipped, at = 0, quantifier.end() if quantifier else end
        elif not skipped and mark[0] in _ESCAPES:
            instead = _ESCAPES[mark[0]]
        elif not skipped and _REFERENCE.fullmatch(mark[0]):
            return None, False
        if instead is not None:
            kept += [pattern[at : mark.start()], instead]
            at = end
            exact = exact and bool(instead)
    return "".join([*kept, "" if skipped else pattern[at:]]), exact
