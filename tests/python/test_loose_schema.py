"""Schemas that client libraries generate become grammars; what these cannot hold is named."""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import re
import sys
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest

from kvanta.constraints.json_schema import close_objects, rebased
from kvanta.constraints.loose_schema import _held_pattern, loosened
from kvanta.constraints.structured_output import StructuredOutputsConfig
from kvanta.errors import InputError
from kvanta.params.structured_outputs import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")

OPTIONS = StructuredOutputsConfig().overrides(StructuredOutputsParams(json_object=True))


def allows(schema: dict[str, Any], *values: Any) -> list[bool]:
    """The grammar of the schema takes these values, as json.dumps writes them."""
    held = {**close_objects(loosened(schema)[0]), "x-guidance": OPTIONS}
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(held))
    found = []
    for value in values:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        text = list(json.dumps(value).encode())
        found.append(matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting())
    return found


def kind(name: str, **more: Any) -> dict[str, Any]:
    required = ["t", *more.pop("required", [])]
    return {"type": "object", "properties": {"t": {"const": name}, **more}, "required": required}


AB = {"$defs": {"A": kind("a"), "B": kind("b")}}
TEXT = {"type": "string"}
NUMBERS = {"additionalProperties": {"type": "integer"}}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's
# A schema, the keywords that are named, values that it allows, and those that the grammar still refuses.
CASES: list[tuple[dict[str, Any], list[str], list[Any], list[Any]]] = [
    ({"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], **AB}, [], [{"t": "a"}, {"t": "b"}], [{"t": "c"}]),
    ({"oneOf": [TEXT, {"type": "integer"}]}, [], ["a", 5], [None]),
    ({"oneOf": [{"enum": [1, 2]}, {"const": 3}]}, [], [1, 3], [4]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"], [5, 1.5], ["a"]),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer"}]}, ["oneOf"], [1, 5], []),
    ({"oneOf": [kind("a"), {"type": "object", "properties": {"u": TEXT}}]}, ["oneOf"], [{"t": "a"}, {"u": ""}], []),
    (
        {"oneOf": [kind("a", u=TEXT, required=["u"]), {**kind("a"), "additionalProperties": False}]},
        [],
        [{"t": "a"}, {"t": "a", "u": ""}],
        [{"t": "b"}],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "discriminator": {"propertyName": "t"}, **AB},
        [],
        [{"t": "a"}],
        [{"t": "c"}],
    ),
    *[
        ({"type": "string", "format": each}, [], ["any"], [5])
        for each in ("password", "binary", "path", "cuid2", "json-string")
    ],
    *[
        ({"type": "string", "format": each}, ["format"], ["any"], [5])
        for each in ("uri-reference", "regex", "idn-email")
    ],
    ({"type": "string", "format": "ipv4"}, [], ["1.2.3.4"], ["any"]),
    ({"type": "integer", "format": "int32"}, [], [5], ["5"]),
    ({"type": "object", "propertyNames": TEXT, **NUMBERS}, [], [{"a": 1}], [{"a": "b"}]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, **NUMBERS}, [], [{"a": 1}, {"b": 2}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}, **NUMBERS}, [], [{"xa": 1}], [{"a": 1}, {"xa": ""}]),
    ({"type": "object", "propertyNames": {"maxLength": 2}, **NUMBERS}, ["propertyNames"], [{"abc": 1}], [{"a": ""}]),
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        ["uniqueItems"],
        [["a"]],
        [["a", "b", "a"]],
    ),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, ["uniqueItems"], [["a", "a"]], [[1]]),
    ({"type": "array", "items": TEXT, "uniqueItems": False}, [], [["a"]], [[1]]),
    ({"type": "string", "pattern": "^(?!a)[a-z]{2}$"}, ["pattern"], ["ab"], ["abc", "a1"]),
    ({"type": "string", "pattern": EMAIL}, ["pattern"], ["a@b.co"], ["a", "a@b"]),
    ({"type": "string", "pattern": r"^(a)\1$"}, ["pattern"], ["any"], [5]),
    ({"type": "object", "patternProperties": {"^(?=x)x": {"type": "null"}}}, ["pattern"], [{"xa": None}], [{"xa": 1}]),
    ({"type": "integer", "not": {"const": 5}}, ["not"], [5], ["a"]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": TEXT}}, [], [{"b": "x"}], [{"a": 1}]),
    ({"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}, ["contains"], [[2]], [["a"]]),
    ({"type": "object", "if": {}, "then": {}, "else": {"required": ["x"]}}, ["else", "if"], [{}], [1]),
    ({**kind("a"), "dependentRequired": {}, "unevaluatedProperties": False}, [], [{"t": "a"}], [{"t": "a", "u": 1}]),
    ({"type": "object", "properties": {"a": TEXT}, "minProperties": 1}, ["minProperties"], [{}], [{"b": 1}]),
    (
        {
            "type": "object",
            "$defs": None,
            "properties": {"a": {"type": "string", "description": None, "enum": None, "minLength": None}},
            "required": None,
            "additionalProperties": None,
        },
        [],
        [{}, {"a": "x"}],
        [{"a": 5}],
    ),
    ({"const": None}, [], [None], [5]),
    ({"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}, [], [{"a": 1}], [{"a": "1"}]),
    ({"$schema": "http://example.com/other", "type": "integer"}, [], [5], ["a"]),
]


@pytest.mark.parametrize(("schema", "lost", "allowed", "refused"), CASES)
def test_a_schema_becomes_a_grammar(
    schema: dict[str, Any], lost: list[str], allowed: list[Any], refused: list[Any]
) -> None:
    before = json.dumps(schema)
    assert loosened(schema)[1] == lost
    assert json.dumps(schema) == before
    assert allows(schema, *allowed) == [True] * len(allowed)
    assert allows(schema, *refused) == [False] * len(refused)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    name: Annotated[str, pydantic.Field(pattern=r"^[A-Z]", max_length=9)]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    age: Annotated[int, pydantic.Field(ge=0, lt=30)] | None = None


class Owner(pydantic.BaseModel):
    """Types that pydantic describes in ways of its own."""

    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    pets: dict[str, Cat | Dog]
    colours: set[Colour]
    pair: tuple[int, str]
    money: decimal.Decimal
    day: datetime.date
    wait: datetime.timedelta
    key: uuid.UUID
    secret: pydantic.SecretStr
    data: bytes
    path: pydantic.FilePath
    site: pydantic.HttpUrl
    mail: Annotated[str, pydantic.Field(json_schema_extra={"format": "email"})]
    friend: Owner | None = None
    anything: Any
    by_colour: dict[Colour, float]
    json_text: pydantic.Json[list[int]]
    address: pydantic.IPvAnyAddress


VALUE = {
    "pet": {"kind": "cat", "name": "Tom"},
    "pets": {"x": {"kind": "dog", "age": 5}},
    "colours": ["red"],
    "pair": [1, "a"],
    "money": "1.5",
    "day": "2026-11-28",
    "wait": "P1D",
    "key": "12345678-1234-4234-8234-123456789abc",
    "secret": "s",
    "data": "d",
    "path": "/etc/hosts",
    "site": "http://example.com/",
    "mail": "a@example.com",
    "friend": None,
    "anything": [None],
    "by_colour": {"red": 1.5},
    "json_text": "[1]",
    "address": "10.0.0.1",
}


def test_types_of_pydantic() -> None:
    schema = Owner.model_json_schema()
    assert allows(schema, VALUE, {**VALUE, "pet": {"kind": "cow"}}) == [True, False]
    assert loosened(schema)[1] == ["uniqueItems"]


@pytest.mark.parametrize(
    ("pattern", "held", "exact"),
    [
        ("^a+$", "^a+$", True),
        (r"a\\b[\b(?=]", r"a\\b[\b(?=]", True),
        (r"\Aab\Z", "^ab$", True),
        (r"\bab\B", "ab", False),
        (r"^(?=a(b)(?!c))*x(?<!y)z$", "^xz$", False),
        (r"^(?:a(?!b))+$", "^(?:a)+$", False),
        (r"(?P<n>a)(?i)", r"(?P<n>a)(?i)", True),
        (r"(a)\1", None, False),
        (r"(?<n>a)\k<n>", None, False),
    ],
)
def test_patterns(pattern: str, held: str | None, exact: bool) -> None:
    assert _held_pattern(pattern) == (held, exact)


def test_references_move_with_their_schema() -> None:
    schema = {
        "$id": "urn:x",
        "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"$ref": "#"}, "c": {"$ref": "urn:x#/$defs/A"}},
    }
    moved = rebased({**schema, "enum": [{"$ref": "#/x"}]}, "#/items/anyOf/1")
    references = [each["$ref"] for each in moved["properties"].values()]
    assert references == ["#/items/anyOf/1/$defs/A", "#/items/anyOf/1", "#/items/anyOf/1/$defs/A"]
    assert moved["enum"] == [{"$ref": "#/x"}]
    assert "$id" not in moved


def test_schemas_that_are_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(sys.getrecursionlimit()):
        schema = {"items": schema}
    for change in (lambda: loosened(schema), lambda: rebased(schema, "#")):
        with pytest.raises(InputError, match="more levels than are read"):
            change()


def test_the_time_of_odd_patterns() -> None:
    """A pattern is read once, from left to right."""
    for part in ("(?=", "[", "\\", "((", ")", "(?!a)*"):
        assert _held_pattern(part * 20_000) is not None
    assert re.compile(_held_pattern("(?!a)*" * 1000 + "x")[0] or "").fullmatch("x")
