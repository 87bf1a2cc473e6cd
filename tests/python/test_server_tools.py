"""Calls of functions: forced ones, and those that a model writes by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import ANY

import pytest
from live_server import LiveServer, live_server

from kvanta.errors import InputError
from kvanta.parsers.call_reader import CallReader, Found
from kvanta.parsers.tool_calls import PARSERS, NamedCall, RequiredCalls, parser_name, rest_of
from kvanta.server.options import read_options

CHAT = [{"role": "user", "content": "Where is Lily?"}]
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": {**COLOUR, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "walk"}},
]
PAINT = '{"name": "paint", "arguments": {"colour": "réd"}}'
WALK = '{"name": "walk", "parameters": {}}'


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tool_call_parser="hermes") as live:
        yield live


def in_pieces(reader: CallReader, text: str, size: int) -> Found:
    all_found = Found()
    for begin in range(0, len(text), size):
        found = reader.take(text[begin : begin + size])
        all_found.content += found.content
        all_found.calls += found.calls
    rest = reader.end()
    return Found(all_found.content + rest.content, all_found.calls + rest.calls)


def summary(found: Found) -> tuple[str, list[tuple[str, Any]]]:
    assert [call["index"] for call in found.calls] == list(range(len(found.calls)))
    assert len({call["id"] for call in found.calls}) == len(found.calls)
    return found.content, [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]


PAINTED, WALKED = ("paint", '{"colour": "réd"}'), ("walk", "{}")


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        ("hermes", "No call < here <tool", "No call < here <tool", []),
        ("hermes", f"<tool_call>{PAINT}</tool_call>", "", [PAINTED]),
        (
            "hermes",
            f"Well.\n<tool_call>\n{PAINT}\n</tool_call>\n<tool_call>{WALK}</tool_call>\n",
            "Well.\n",
            [PAINTED, WALKED],
        ),
        ("hermes", f"<tool_call>[{PAINT}, {WALK}]</tool_call>", "", [PAINTED, WALKED]),
        ("hermes", f"<tool_call>{PAINT}", "", [PAINTED]),
        ("hermes", "<tool_call>{}</tool_call> a <b>", "<tool_call>{}</tool_call> a <b>", []),
        ("hermes", f"<tool_call>{PAINT[:-4]}", f"<tool_call>{PAINT[:-4]}", []),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", []),
        ("llama3_json", f" {PAINT}; {WALK}", "", [PAINTED, WALKED]),
        ("llama3_json", f"<|python_tag|>{WALK}", "", [WALKED]),
        ("llama3_json", f"[{WALK}, {PAINT}]", "", [WALKED, PAINTED]),
        ("llama3_json", f"I say {WALK}", f"I say {WALK}", []),
        ("llama3_json", '{"a": 1}', '{"a": 1}', []),
        ("llama3_json", "<|python", "<|python", []),
        ("llama3_json", "  ", "  ", []),
    ],
)
def test_any_pieces_of_a_text_hold_the_same_calls(
    parser: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert summary(rest_of(PARSERS[parser](), text)) == (content, calls)
    for size in (1, 2, 3, 7, 20):
        assert summary(in_pieces(PARSERS[parser](), text, size)) == (content, calls)
    one = in_pieces(PARSERS[parser](parallel=False), text, 3)
    assert summary(one) == (content, calls[:1])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('[{"name": "paint", "parameters": {"colour": "réd"}}, ' + WALK + "]", "", [PAINTED, WALKED]),
        ('[ { "name" : "paint" , "parameters" : {"colour": "réd"} } , { "name" : "wa', "", [PAINTED]),
        ('[{"name": "paint", "parameters": {"colour": "réd"}}, {"name": "walk", "parameters": ', "", [PAINTED]),
        ('[{"name": "paint", "parameters": {"colour": "réd"}}, ', "", [PAINTED]),
        *[
            (text, text, [])
            for text in (
                '[{"name": "paint", "parameters": {"colour": "réd"} ',
                '[{"name": "walk", "parameters": {"far": tr',
            )
        ],
        (f"[{WALK}, " + '{"name": "a\\"b", "parameters": {', "", [WALKED]),
        ('[{"name": "walk"', '[{"name": "walk"', []),
        *[
            (text, text, [])
            for text in (
                '[{"name": "walk", "parameters": {"far": 1e999}}]',
                f'[{WALK}, {{"name": "walk", "parameters": {{"far": -1e999}}}}, {WALK}]',
            )
        ],
        ("", "", []),
    ],
)
def test_demanded_calls_that_are_cut_off(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for parallel in (True, False):
        for size in (1, 3, 1000):
            reader = RequiredCalls(parallel=parallel)
            assert summary(in_pieces(reader, text, size)) == (content, calls if parallel else calls[:1])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"colour": 1}', "", [("paint", '{"colour": 1}')]),
        ('{"colour": "re', '{"colour": "re', []),
        ("", "", []),
    ],
)
def test_a_call_of_a_named_function_is_whole_or_none(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """A client may run what a stream has begun, such as the removal of a folder whose name is cut off."""
    for size in (1, 100):
        assert summary(in_pieces(NamedCall("paint"), text, size)) == (content, calls)


def test_what_is_demanded_over_http(server: LiveServer) -> None:
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 200, "temperature": 1, "seed": 5}
    choice = server.post("/v1/chat/completions", **body, tool_choice="required", parallel_tool_calls=False).json()[
        "choices"
    ][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] in ("paint", "walk")
    json.loads(call["function"]["arguments"])

    named = {"type": "function", "function": {"name": "paint"}}
    choice = server.post("/v1/chat/completions", **body, tool_choice=named).json()["choices"][0]
    assert choice["finish_reason"] == "stop"  # as OpenAI has it
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "paint"
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")

    form = {"type": "json_schema", "json_schema": {"name": "walk", "schema": {"const": 7}}}  # of answers that are texts
    assert server.post("/v1/chat/completions", **body, tool_choice=named, response_format=form).json()["choices"] == [
        {**choice, "message": {**choice["message"], "tool_calls": [{**call, "id": ANY}]}}
    ]

    streamed = deltas(server, **body, tool_choice=named)
    pieces = [call for delta, _ in streamed for call in delta.get("tool_calls", [])]
    assert [piece["function"].get("name") for piece in pieces] == ["paint"] + [None] * (len(pieces) - 1)
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]


def test_a_demanded_call_that_is_cut_off_over_http(server: LiveServer) -> None:
    far = {"type": "object", "properties": {"way": {"const": "far " * 50}}, "required": ["way"]}
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 90, "temperature": 0}
    chat = {**body, "tools": [{"type": "function", "function": {"name": "walk", "parameters": far}}]}
    for tool_choice in ("required", {"type": "function", "function": {"name": "walk"}}):
        choice = server.post("/v1/chat/completions", **chat, tool_choice=tool_choice).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert "tool_calls" not in choice["message"]
        assert "far far" in choice["message"]["content"]
        streamed = deltas(server, **chat, tool_choice=tool_choice)
        assert not any("tool_calls" in delta for delta, _ in streamed)
        assert streamed[-1][1] == "length"

    tools = [{"name": "walk", "input_schema": far}]
    for anthropic_choice in ({"type": "any"}, {"type": "tool", "name": "walk"}):
        answer = server.post("/v1/messages", **body, tools=tools, tool_choice=anthropic_choice).json()
        assert [block["type"] for block in answer["content"]] == ["text"]
        assert answer["stop_reason"] == "max_tokens"
    items = {"input": CHAT, "max_output_tokens": 90, "temperature": 0, "tool_choice": "required"}
    function = {"type": "function", "name": "walk", "parameters": far}
    response = server.post("/v1/responses", **items, tools=[function]).json()
    assert ([item["type"] for item in response["output"]], response["status"]) == (["message"], "incomplete")


def deltas(server: LiveServer, **body: Any) -> list[tuple[dict[str, Any], str | None]]:
    text = server.post("/v1/chat/completions", **body, stream=True).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]


def test_what_a_model_writes_of_its_own_accord_over_http(server: LiveServer) -> None:
    # A form stands in for a model that was trained to call.
    form = r"Yes\. <tool_call>\{\"name\": \"walk\", \"arguments\": \{\"to\": [0-9]\}\}</tool_call>"
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 200, "temperature": 0, "guided_regex": form}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Yes. "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "walk"
    streamed = deltas(server, **body)
    assert "".join(delta.get("content", "") for delta, _ in streamed) == "Yes. "
    ((_, one),) = [(i, call) for i, (delta, _) in enumerate(streamed) for call in delta.get("tool_calls", [])]
    assert one["function"] == call["function"]
    assert streamed[-1] == ({}, "tool_calls")
    assert {reason for _, reason in streamed[:-1]} == {None}
    silences: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for silent in silences:
        message = server.post("/v1/chat/completions", **{**body, **silent}).json()["choices"][0]["message"]
        assert "<tool_call>" in message["content"]
        assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": "required"}, "tools is empty"),
        ({"tool_choice": "maybe", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}, "tools": TOOLS}, "paint, walk"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools has"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_choice": ["a"]}, "exclude"),
        ({"parallel_tool_calls": "some"}, "parallel_tool_calls"),
    ],
)
def test_bad_fields(server: LiveServer, fields: dict[str, Any], said: str) -> None:
    response = server.post("/v1/chat/completions", messages=CHAT, **fields)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_definitions_of_equal_names_may_differ(server: LiveServer) -> None:
    def tool(name: str, **more: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/thing"}}, "required": ["x"], **more}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    tools = [
        tool("a", **{"$defs": {"thing": {"const": "kelvin"}}}),
        tool("b", **{"$defs": {"thing": {"const": "newton"}}}),
        tool("c", **{"$id": "urn:c", "$defs": {"thing": {"$ref": "urn:c#/$defs/more"}, "more": {"const": "pascal"}}}),
        {"type": "function", "function": {"name": "d", "parameters": {"type": "object", "$defs": None}}},
    ]
    for name, unit in (("a", "kelvin"), ("b", "newton"), ("c", "pascal")):
        chosen = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": chosen}}
        body = {"messages": CHAT, "max_tokens": 120, "parallel_tool_calls": False, "tools": tools}
        answer = server.post("/v1/chat/completions", **body, tool_choice=choice).json()["choices"][0]["message"]
        (call,) = answer["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"x": unit}
    assert server.post("/v1/chat/completions", **body, tool_choice="required").status_code == 200


def test_options() -> None:
    assert read_options({"tool_call_parser": "qwen25"}).tool_call_parser == parser_name("hermes")
    with pytest.raises(InputError, match=r"none of deepseek_v3, .*hermes, kimi_k2, llama3_json"):
        read_options({"tool_call_parser": "pythonic"})
    with pytest.raises(InputError, match="needs tool_call_parser"):
        read_options({"enable_auto_tool_choice": True})


@pytest.fixture
def without_tools(server: LiveServer) -> Iterator[None]:
    """A chat template that does not read `tools`."""
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    tokenizer.use_chat_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    yield
    tokenizer.chat_template = kept


@pytest.mark.usefixtures("without_tools")
def test_functions_that_the_template_does_not_show_are_named(server: LiveServer) -> None:
    answer = server.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, max_tokens=2)
    assert answer.headers["x-kvanta-ignored"] == "tools"
    assert "x-kvanta-ignored" not in server.post("/v1/chat/completions", messages=CHAT, max_tokens=2).headers
    text = "".join(server.post("/tokenize", messages=CHAT, tools=TOOLS, return_token_strs=True).json()["token_strs"])
    assert text.index('<tool_call>\n{"name": "NAME"') < text.index("Where is Lily?")
    anthropic = [{"name": "walk", "input_schema": {"type": "object"}}]
    counts = [
        server.post("/v1/messages/count_tokens", messages=CHAT, tools=tools).json()["input_tokens"]
        for tools in (None, anthropic)
    ]
    assert counts[1] > counts[0] + 50


@pytest.mark.parametrize("arguments", ['{"to": ', "[1]", "", None, 5])
def test_a_history_with_broken_calls_goes_on(server: LiveServer, arguments: Any) -> None:
    function = {"name": "walk", "arguments": arguments}
    chat = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "error"},
        {"role": "user", "content": "Go on."},
    ]
    items = [
        {"type": "function_call", "call_id": "c", "name": "walk", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "error"},
    ]
    blocks = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "walk", "input": arguments}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "error"}]},
    ]
    for path, body in (
        ("chat/completions", {"messages": chat, "max_tokens": 2}),
        ("responses", {"input": [*CHAT, *items], "max_output_tokens": 2}),
        ("messages", {"messages": [*CHAT, *blocks], "max_tokens": 2}),
    ):
        answer = server.post(f"/v1/{path}", **body)
        assert answer.status_code == 200, answer.text
