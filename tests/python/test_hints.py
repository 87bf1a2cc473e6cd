"""Hints that clients send, out of habit or for another vendor's service: accepted, named, without effect."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, events, live_server

from kvanta.server.openai.responses_request import ResponsesRequest
from kvanta.server.requests.custom_tools import CustomCalls
from kvanta.server.requests.protocol import ChatRequest

CHAT = [{"role": "user", "content": "Lily"}]
MESSAGES, RESPONSES, CHATS = "/v1/messages", "/v1/responses", "/v1/chat/completions"
SEARCH, SHELL = {"type": "web_search"}, {"type": "local_shell"}
OFF = {"type": "disabled"}
CUSTOM = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
WALK = {"type": "function", "name": "walk", "parameters": {"type": "object", "properties": {}}}
BASH = {"type": "bash_20250124", "name": "bash"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(notes_unread=True) as running:
        yield running


def post(server: LiveServer, path: str, body: Any, **headers: str) -> Any:
    """The answer to a body, which is JSON or bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.client.post(path, content=data, headers={"Content-Type": "application/json", **headers})


def prompt_of(server: LiveServer, **fields: Any) -> str:
    """The prompt that the chat template makes."""
    tokens = server.post("/tokenize", **fields).json()["tokens"]
    return str(server.post("/detokenize", tokens=tokens).json()["prompt"])


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (MESSAGES, {"output_config": {"effort": "high"}}, ["output_config.effort"]),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear"}]}}, ["context_management"]),
        (MESSAGES, {"tools": [BASH]}, ["tools[bash_20250124]"]),
        (MESSAGES, {"tools": [BASH], "tool_choice": {"type": "any"}}, ["tools[bash_20250124]"]),
        (MESSAGES, {"mcp_servers": [{"url": "https://a"}], "speed": "fast"}, ["mcp_servers", "speed"]),
        (RESPONSES, {"store": True, "truncation": "auto"}, ["store", "truncation"]),
        (RESPONSES, {"reasoning": {"effort": "high", "summary": "auto"}}, ["reasoning.summary", "reasoning.effort"]),
        (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, ["include[reasoning.encrypted_content]"]),
        (RESPONSES, {"tools": [SEARCH, SHELL]}, ["tools[web_search]", "tools[local_shell]"]),
        (RESPONSES, {"tools": [SEARCH], "tool_choice": SEARCH}, ["tools[web_search]"]),
        (CHATS, {"reasoning_effort": "low"}, ["reasoning_effort"]),
        (CHATS, {"verbosity": "high", "web_search_options": {}}, ["verbosity", "web_search_options"]),
        (CHATS, {"enable_thinking": False, "thinking": OFF}, ["enable_thinking", "thinking"]),
        (CHATS, {"tools": [{"type": "web_search_preview"}]}, ["tools[web_search_preview]"]),
        (CHATS, {"reasoning": {"effort": "high", "exclude": True}}, ["reasoning.exclude", "reasoning.effort"]),
        (CHATS, {"provider": {}, "cache_prompt": True, "chat_id": "a"}, ["provider", "cache_prompt", "chat_id"]),
        (CHATS, {"user": None, "store": None}, []),
    ],
)
def test_hints_are_named(server: LiveServer, path: str, fields: dict[str, Any], names: list[str]) -> None:
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    body = {"input": "Lily"} if path.endswith("responses") else {"messages": CHAT}
    for stream in (False, True):
        answer = server.post(path, **body, **{limit: 2}, stream=stream, **fields)
        assert answer.status_code == 200, answer.text
        assert [each for each in answer.headers.get("x-kvanta-ignored", "").split(", ") if each] == names


def test_the_template_reads_what_it_can(server: LiveServer) -> None:
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    tokenizer.use_chat_template("{{ 'on' if enable_thinking is undefined or enable_thinking else 'off' }}")
    try:
        for fields, text in (
            ({"enable_thinking": False}, "off"),
            ({"thinking": {"type": "disabled"}}, "off"),
            ({"thinking": True}, "on"),
            ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "off"),
            ({"reasoning_effort": "minimal"}, "off"),
            ({"enable_thinking": "false"}, "off"),
            ({"chat_template_kwargs": {"enable_thinking": "False"}}, "off"),
            ({"reasoning": {"enabled": False}}, "off"),
            ({"reasoning": {"effort": "none"}}, "off"),
            ({"reasoning": "much"}, "on"),
        ):
            answer = server.post("/tokenize", messages=CHAT, **fields)
            assert tokenizer.decode(answer.json()["tokens"]) == text, fields
            assert "x-kvanta-ignored" not in answer.headers
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'{"messages":[{"role":"user","content":"cut \ud83d here"}]}', "cut \ufffd here"),
        (rb'{"messages":[{"role":"user","content":"cut \uDE00 here"}]}', "cut \ufffd here"),
        (rb'{"messages":[{"role":"user","content":"a \ud83d\ude00 face"}]}', "a \U0001f600 face"),
        (rb'{"messages":[{"role":"user","content":"letters \\ud83d"}]}', "letters \\ud83d"),
        (rb'{"messages":[{"role":"user","content":"\\\ud83d"}]}', "\\\ufffd"),
        (b'{"messages":[{"role":"user","content":"bytes \xed\xa0\x80 here"}]}', "bytes \ufffd here"),
    ],
)
def test_halves_of_characters_are_replaced(server: LiveServer, body: bytes, text: str) -> None:
    answer = post(server, "/tokenize", body)
    assert answer.status_code == 200, answer.text
    prompt = server.post("/detokenize", tokens=answer.json()["tokens"]).json()["prompt"]
    assert text in prompt


def test_numbers_may_be_written_in_other_ways(server: LiveServer) -> None:
    plain = server.post("/v1/completions", prompt="Lily", max_tokens=2, temperature=0.0).json()["choices"][0]["text"]
    for fields in (
        {"max_tokens": 2.0, "temperature": 0},
        {"max_tokens": "2", "temperature": "0.0"},
        {"max_tokens": 2, "temperature": 1, "top_p": 0},
    ):
        assert server.post("/v1/completions", prompt="Lily", **fields).json()["choices"][0]["text"] == plain


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21",
        "/openai/v1/chat/completions",
        "/openai/chat/completions",
    ],
)
def test_paths_of_other_clients(server: LiveServer, path: str) -> None:
    assert server.post(server.url + path, messages=CHAT, max_tokens=1).status_code == 200


def test_azures_responses(server: LiveServer) -> None:
    path = server.url + "/openai/responses?api-version=2025-04-01-preview"
    assert server.post(path, input="Lily", max_output_tokens=1).status_code == 200


def test_azures_header_has_the_key() -> None:
    with live_server(api_keys=["one"]) as server:
        for headers, status in (({"api-key": "one"}, 200), ({"api-key": "two"}, 401), ({}, 401)):
            body = {"messages": CHAT, "max_tokens": 1}
            path = "/openai/deployments/a/chat/completions"
            assert server.client.post(path, json=body, headers=headers).status_code == status
        assert server.client.get(server.url + "//v1/models").status_code == 401


def test_any_model_name() -> None:
    with live_server() as server:
        server.service.names = ["tiny", "*"]
        answer = server.post("/v1/chat/completions", model="claude-haiku", messages=CHAT, max_tokens=1)
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
        assert [card["id"] for card in server.client.get("/v1/models").json()["data"]] == ["tiny"]


def test_compressed_bodies(server: LiveServer) -> None:
    body = json.dumps({"prompt": "Lily", "max_tokens": 1}).encode()
    packed = gzip.compress(body)
    raw = zlib.compressobj(wbits=-15)
    headless = raw.compress(body) + raw.flush()
    for coding, data in (
        ("gzip", packed),
        ("deflate", zlib.compress(body)),
        ("deflate", headless),
        ("GZIP", packed),
    ):
        assert post(server, "/v1/completions", data, **{"Content-Encoding": coding}).status_code == 200
    for data, message in (
        (body, "not compressed"),
        (packed[:-9], "ends too early"),
        (packed + b"x", "1 bytes follow"),
        (packed + packed, "follow the end"),
        (b"", ""),
    ):
        answer = post(server, "/v1/completions", data, **{"Content-Encoding": "gzip"})
        assert answer.status_code == 400
        assert message in error_of(answer)["message"]
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 100_000
    assert post(server, "/v1/completions", bomb, **{"Content-Encoding": "gzip"}).status_code == 413


def test_parts_that_are_not_text(server: LiveServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    document = {"type": "document", "source": {"type": "text", "data": "A tale."}, "title": "Book"}
    found = {"type": "search_result", "content": [{"type": "text", "text": "A hit."}], "title": "Page", "source": "x"}
    content = [{"type": "text", "text": "See"}, image, document, found, {"type": "input_audio", "input_audio": {}}]
    prompt = prompt_of(server, messages=[{"role": "user", "content": content}])
    for text in ("See", "[image: not read by this model]", "Book\nA tale.", "Page\nA hit.", "[audio: not read by"):
        assert text in prompt
    blocks = [{"type": "image", "source": {"type": "base64", "data": ""}}, document, {"type": "text", "text": "Go"}]
    answer = server.post("/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=1)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-kvanta-ignored"] == "image"
    with live_server() as strict:
        answer = strict.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=1)
        assert answer.status_code == 400
        assert "--unsupported-content note" in error_of(answer)["message"]
        content.remove(image)
        assert strict.post("/tokenize", messages=[{"role": "user", "content": content[:-1]}]).status_code == 200


def test_histories_with_what_others_made_stay_open(server: LiveServer) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Lily"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
        {"type": "function_call_output", "call_id": "gone", "output": "An old result."},
        {"role": "user", "content": "Go on."},
    ]
    answer = server.post("/v1/responses", input=items, tools=[CUSTOM], max_output_tokens=2)
    assert answer.status_code == 200, answer.text
    names = answer.headers["x-kvanta-ignored"]
    assert names == "reasoning.encrypted_content, input[web_search_call], input[5].call_id"
    blocks = [
        {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "compaction", "content": "They ran."},
        {"type": "text", "text": "So."},
    ]
    upload = {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "a"}]}
    messages = [*CHAT, {"role": "assistant", "content": blocks}, upload]
    answer = server.post("/v1/messages", messages=messages, max_tokens=1)
    names = "messages[server_tool_use], messages[redacted_thinking], messages[container_upload]"
    assert answer.headers["x-kvanta-ignored"] == names, answer.text
    program = {"type": "program_output", "id": "a"}
    answer = server.post("/v1/responses", input=[items[0], program], max_output_tokens=1)
    assert answer.headers["x-kvanta-ignored"] == "input[program_output]"
    refused = server.post("/v1/responses", input=[{"type": "item_reference", "id": "a"}])
    assert "item_reference is not supported: answers are not kept (--store-responses)" in error_of(refused)["message"]


def file_of(data: bytes, kind: str = "text/plain") -> str:
    """A file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_files_of_text_are_text(server: LiveServer) -> None:
    book = {"filename": "book.md", "file_data": file_of("A täle.".encode())}
    for part in ({"type": "file", "file": book}, {"type": "input_file", **book}):
        assert "book.md\nA täle." in prompt_of(server, messages=[{"role": "user", "content": [part]}])
    source = {"type": "base64", "media_type": "text/plain", "data": file_of(b"A tale.").partition(",")[2]}
    document = {"type": "document", "title": "Book", "source": source}
    assert "Book\nA tale." in prompt_of(server, messages=[{"role": "user", "content": [document]}])
    item = {"role": "user", "content": [{"type": "input_file", **book}, {"type": "input_text", "text": "Go"}]}
    assert "x-kvanta-ignored" not in server.post("/v1/responses", input=[item], max_output_tokens=1).headers
    for data in (file_of(b"%PDF-1.7"), file_of(b"\xff\xfe"), file_of(b"a\0b"), "data:text/plain,a", "%", 5):
        part = {"type": "file", "file": {"file_data": data}}
        assert "[file: not read" in prompt_of(server, messages=[{"role": "user", "content": [part]}])


def test_blocks_of_other_apis_in_chats(server: LiveServer) -> None:
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    names = "{% if false %}{{ message.tool_calls }}{{ 'tool' == message.role }}{% endif %}"
    tokenizer.use_chat_template(names + "{{ messages | tojson }}")
    said: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}},
        {"type": "web_search_tool_result", "tool_use_id": "b", "content": []},
    ]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "A cat."}]}
    answers = [result, {"type": "container_upload", "file_id": "f"}, {"type": "text", "text": "And?"}]
    try:
        messages = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": answers}]
        answer = server.post("/tokenize", messages=messages)
        prompt = json.loads(tokenizer.decode(answer.json()["tokens"]))
        mistrals = {"type": "thinking", "thinking": [{"type": "text", "text": "So."}]}
        short = [*CHAT, {"role": "assistant", "content": [mistrals]}]
        other = json.loads(tokenizer.decode(server.post("/tokenize", messages=short).json()["tokens"]))
    finally:
        tokenizer.chat_template = kept
    assert [message["role"] for message in prompt] == ["user", "assistant", "tool", "user"]
    assert (prompt[1]["content"], prompt[1]["reasoning_content"]) == ("I look.", "Hm.")
    assert prompt[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert (prompt[2]["content"], prompt[3]["content"]) == ("A cat.", "And?")
    names = "messages[redacted_thinking], messages[web_search_tool_result], messages[container_upload]"
    assert answer.headers["x-kvanta-ignored"] == names
    assert other[1]["reasoning_content"] == "So."


def test_switches_as_texts(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "walk", "strict": "false"}}]
    body = {"messages": CHAT, "tools": tools, "parallel_tool_calls": "false", "stream": "false", "max_tokens": 1}
    assert server.post(CHATS, **body).json()["object"] == "chat.completion"
    choice = {"type": "auto", "disable_parallel_tool_use": "true"}
    assert server.post(MESSAGES, messages=CHAT, tool_choice=choice, max_tokens=1).status_code == 200
    tools[0]["function"] = {"name": "walk", "strict": "perhaps"}
    assert "strict of a function must be" in error_of(server.post(CHATS, messages=CHAT, tools=tools))["message"]


def test_custom_tools_of_chats(server: LiveServer) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": grammar}}
    walk = {"type": "function", "function": {"name": "walk"}}
    assert "patch walk" in prompt_of(server, messages=CHAT, tools=[tool, walk])
    (function, _) = ChatRequest(messages=CHAT, tools=[tool, walk]).functions.offered
    assert function["function"]["description"] == "Edits.\nThe input has the lark grammar:\nstart: /.+/"
    named = {"type": "custom", "custom": {"name": "patch"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, allowed):
        body = {"messages": CHAT, "tools": [tool, walk], "tool_choice": choice, "max_tokens": 400, "seed": 1}
        message = server.post(CHATS, **body).json()["choices"][0]["message"]
        call = message["tool_calls"][0]
        assert (call["type"], call["custom"]["name"], call.keys()) == ("custom", "patch", {"id", "type", "custom"})
        with server.client.stream("POST", CHATS, json={**body, "stream": True}) as stream:
            deltas = [json.loads(data)["choices"][0]["delta"] for data in events(stream) if data != "[DONE]"]
        (streamed, *_) = [each for delta in deltas for each in delta.get("tool_calls", ())]
        assert (streamed["index"], streamed["custom"]) == (0, call["custom"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
        assert server.post(CHATS, messages=[*CHAT, message, result], tools=[tool], max_tokens=1).status_code == 200


def test_pieces_of_custom_calls() -> None:
    calls = CustomCalls({"patch"})

    def piece(index: int, arguments: str, name: str = "") -> dict[str, Any]:
        head = {"id": f"call_{index}", "type": "function"} if name else {}
        return {"index": index, **head, "function": {"arguments": arguments, **({"name": name} if name else {})}}

    assert calls.take([piece(0, '{"inp', "patch")], finished=False) == []
    assert calls.take([piece(0, 'ut": "a')], finished=False) == []
    walk = piece(1, "{", "walk")
    patched = {"index": 0, "id": "call_0", "type": "custom", "custom": {"name": "patch", "input": "ab"}}
    assert calls.take([piece(0, 'b"}'), walk], finished=False) == [patched, walk]
    assert calls.take([piece(1, "}")], finished=False) == [piece(1, "}")]
    cut = {**patched, "index": 2, "id": "call_2", "custom": {"name": "patch", "input": '{"in'}}
    assert calls.take([piece(2, '{"in', "patch")], finished=True) == [cut]


def test_custom_tools_are_functions_of_one_text(server: LiveServer) -> None:
    inside = {"type": "namespace", "name": "mcp", "tools": [WALK]}
    request = ResponsesRequest(input="a", tools=[CUSTOM, inside, {"type": "web_search"}])
    chat = request.chat()
    assert [tool["function"]["name"] for tool in chat.tools] == ["patch", "walk"]
    choice = {"type": "custom", "name": "patch"}
    body = {"input": "Edit.", "tools": [CUSTOM, inside], "tool_choice": choice, "max_output_tokens": 400, "seed": 1}
    (item,) = server.post("/v1/responses", **body).json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert isinstance(item["input"], str)
    with server.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as stream:
        found = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: ")]
    done = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
    assert [event["input"] for event in done] == [item["input"]]
    assert not [event for event in found if "function_call_arguments" in event["type"]]
    choice = {"type": "function", "name": "walk"}
    (item,) = server.post("/v1/responses", **{**body, "tool_choice": choice}).json()["output"]
    assert (item["type"], item["namespace"]) == ("function_call", "mcp")
