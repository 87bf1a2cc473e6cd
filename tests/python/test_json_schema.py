"""Schemas of constrained JSON: objects are closed unless they say otherwise."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta import LLM, SamplingParams, StructuredOutputsParams
from kvanta.constraints.json_schema import close_objects

CLOSED = {"additionalProperties": False}
A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
COLOUR: dict[str, Any] = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
CHAT = [{"role": "user", "content": "Where is Lily?"}]
REFERENCE: dict[str, Any] = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, {**A, **CLOSED}),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "patternProperties": {"^x": A}}, {**A, "patternProperties": {"^x": {**A, **CLOSED}}}),
        ({"properties": {"properties": A}}, {"properties": {"properties": {**A, **CLOSED}}, **CLOSED}),
        ({**A, "required": ["a", "b"]}, {**A, "required": ["a", "b"]}),  # else no object would match
        ({"items": A, "prefixItems": [A]}, {"items": {**A, **CLOSED}, "prefixItems": [{**A, **CLOSED}]}),
        ({"additionalProperties": A}, {"additionalProperties": {**A, **CLOSED}}),
        ({"anyOf": [A, B]}, {"anyOf": [{**A, **CLOSED}, {**B, **CLOSED}]}),
        ({"enum": [A], "const": B, "default": A}, {"enum": [A], "const": B, "default": A}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": {**A, **CLOSED}}}),
        ({"allOf": [REFERENCE], "$defs": {"A": A}}, {"allOf": [REFERENCE], "$defs": {"A": {**A, **CLOSED}}}),
        # Together they describe one object, of which each would forbid the others' properties.
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({"allOf": [REFERENCE, B], "$defs": {"A": A}}, {"allOf": [REFERENCE, B], "$defs": {"A": A}}),
        ({**B, **REFERENCE, "$defs": {"A": A}}, {**B, **REFERENCE, "$defs": {"A": A}}),
        ({**A, "anyOf": [B, A]}, {**A, "anyOf": [B, A]}),
        ({**A, "if": A, "then": B}, {**A, "if": A, "then": B}),
        # Parts that list no further property leave the whole closed.
        ({**A, "anyOf": [{"required": ["a"]}, A]}, {**A, "anyOf": [{"required": ["a"]}, A], **CLOSED}),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == closed
    assert json.dumps(schema) == before


def test_references_in_a_circle_end() -> None:
    node: dict[str, Any] = {"properties": {"next": {"$ref": "#/$defs/n"}}}
    assert close_objects({"$ref": "#/$defs/n", "$defs": {"n": node}})["$defs"]["n"] == {**node, **CLOSED}
    own = {"allOf": [{"$ref": "#"}, A]}
    assert close_objects(own) == own
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        assert calls < 100_000, "one for each way through the references, of which there are 2^60"

    sys.setprofile(count)
    try:
        close_objects({"$ref": "#/$defs/d0", "$defs": {**definitions, "d60": A}})
    finally:
        sys.setprofile(None)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories260k", kv_cache_memory_bytes="32MiB", threads=2)


def texts(llm: LLM, count: int = 10, **form: Any) -> list[Any]:
    params = SamplingParams(
        temperature=1.0, seed=1, n=count, max_tokens=60, structured_outputs=StructuredOutputsParams(**form)
    )
    return llm.generate("Once upon a time", params)[0].outputs


def test_every_answer_ends_with_the_properties_of_the_schema(llm: LLM) -> None:
    """A weak model never ends an open object: it goes on with further properties."""
    closed = texts(llm, json=COLOUR)
    assert [text.finish_reason for text in closed] == ["stop"] * 10
    assert all(json.loads(text.text).keys() == {"colour"} for text in closed)
    opened = texts(llm, json=COLOUR, disable_additional_properties=False)
    assert any(text.finish_reason == "length" or len(json.loads(text.text)) > 1 for text in opened)


def test_what_is_not_held_is_a_warning(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="structured_outputs: a grammar cannot hold a text to all of not, uniqueItems"):
        texts(
            llm,
            1,
            json={**COLOUR, "not": {"type": "null"}, "properties": {"colour": {"enum": ["red"], "uniqueItems": True}}},
        )


def test_the_switch_of_the_model() -> None:
    options: list[dict[str, Any]] = [
        {"structured_outputs_config": '{"disable_additional_properties": false, "backend": "guidance"}'},
        {"structured_outputs_config": {"disable_any_whitespace": True}},
        {"constrained_json_whitespace_pattern": "[ ]{2}"},
    ]
    opened, dense, wide = (
        LLM("stories260k", kv_cache_memory_bytes="8MiB", threads=1, max_num_seqs=10, **each) for each in options
    )
    found = texts(opened, json=COLOUR)
    assert any(text.finish_reason == "length" or len(json.loads(text.text)) > 1 for text in found)
    assert {text.finish_reason for text in texts(opened, json=COLOUR, disable_additional_properties=True)} == {"stop"}
    assert {text.text for text in texts(dense, json=COLOUR)} <= {'{"colour":"red"}', '{"colour":"blue"}'}
    assert all(text.text.startswith(('{"', '{  "')) for text in texts(wide, json=COLOUR))
    assert any("  " in text.text for text in texts(wide, json=COLOUR))


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_strict_in_requests(server: LiveServer) -> None:
    strict = {**COLOUR, **CLOSED}

    def chat(**body: Any) -> Any:
        return server.post("/v1/chat/completions", messages=CHAT, max_tokens=120, seed=1, **body)

    def form(schema: Any, **more: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}

    def tool(schema: Any, **more: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "paint", "parameters": schema, **more}}]

    for body in (form(strict, strict=True), form(COLOUR), form(COLOUR, strict=False), form(COLOUR, strict=True)):
        answer = chat(response_format=body)
        assert json.loads(answer.json()["choices"][0]["message"]["content"]).keys() == {"colour"}, answer.text
    for choice in ("required", {"type": "function", "function": {"name": "paint"}}):
        for own in (tool(COLOUR), tool(COLOUR, strict=True)):
            answer = chat(tools=own, tool_choice=choice, parallel_tool_calls=False)
            (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]).keys() == {"colour"}
    assert error_of(chat(tools=tool(COLOUR, strict="yes")))["param"] == "tools"
    opened = chat(structured_outputs={"json": COLOUR, "disable_additional_properties": False})
    assert opened.status_code == 200


LIMITS = {"type": "object", "properties": {"v": {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True}}}
SCHEMA = {"name": "x", "schema": {**LIMITS, "required": ["v"]}}
WRITE = {"name": "write", "strict": False, "parameters": LIMITS}
SHORT = {"temperature": 0, "max_tokens": 60}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (
            "chat/completions",
            {"messages": CHAT, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "response_format",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "response_format": {"type": "json_object", "schema": LIMITS}},
            "response_format",
        ),
        ("chat/completions", {"messages": CHAT, "guided_json": json.dumps(LIMITS)}, "guided_json"),
        (
            "chat/completions",
            {"messages": CHAT, "tools": [{"type": "function", "function": WRITE}], "tool_choice": "required"},
            "tools",
        ),
        ("completions", {"prompt": "Lily", "response_format": {"type": "json_schema", **SCHEMA}}, "response_format"),
        ("responses", {"input": CHAT, "text": {"format": {"type": "json_schema", **SCHEMA}}}, "text.format"),
        ("responses", {"input": CHAT, "text": {"format": {"type": "json_object", "schema": LIMITS}}}, "text.format"),
        (
            "messages",
            {"messages": CHAT, "output_config": {"format": {"type": "json_schema", "schema": LIMITS}}},
            "output_config.format",
        ),
    ],
)
def test_what_is_not_held_is_named(server: LiveServer, path: str, body: dict[str, Any], names: str) -> None:
    limit = {"max_output_tokens": 60, "temperature": 0} if path == "responses" else SHORT
    answer = server.post(f"/v1/{path}", **body, **limit)
    assert answer.status_code == 200, answer.text
    assert f"{names}.uniqueItems" in answer.headers["x-kvanta-ignored"].split(", ")
    if "tools" not in body:
        assert re.search(r'\{\s*\\*"v\\*"\s*:\s*\[|\{\s*\}', json.dumps(answer.json()).replace("\\n", " "))
