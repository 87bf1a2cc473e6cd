"""/v1/messages, with Anthropic's unchanged client and by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import MessageParam
from live_server import LiveServer, live_server

from kvanta.parsers.answer import AnswerShape
from kvanta.server.anthropic.messages_request import MessagesRequest
from kvanta.server.http.errors import ApiError

CHAT: list[MessageParam] = [{"role": "user", "content": "Lily"}]
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
TOOLS: list[Any] = [
    {"name": "paint", "description": "Paints.", "input_schema": COLOUR},
    {"name": "walk", "input_schema": {"type": "object", "properties": {}}},
]
ALL = 'She left\\.</think>Far away\\.<tool_call>\\{"name": "walk", "arguments": \\{\\}\\}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tool_call_parser="hermes", api_keys=["key"]) as running:
        running.client.headers["X-Api-Key"] = "key"
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as made:
        yield made


def anthropic_error(response: httpx2.Response) -> tuple[str, str]:
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return body["error"]["type"], body["error"]["message"]


def chat(**body: Any) -> Any:
    parsers: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None), knows_thinking=True)
    return MessagesRequest(max_tokens=5, **body).chat(parsers)


def test_create_and_stream(server: LiveServer, client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 300, "extra_body": {"temperature": 0}}
    system: Any = [{"type": "text", "text": "Tell a story.", "cache_control": {"type": "ephemeral"}}]
    message = client.messages.create(**body, system=system, stop_sequences=["the"])
    messages = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "Lily"}]
    same = server.post("/v1/chat/completions", messages=messages, max_tokens=300, temperature=0, stop="the").json()
    (block,) = message.content
    assert block.type == "text"
    assert block.text == same["choices"][0]["message"]["content"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "the")
    assert message.usage.output_tokens == same["usage"]["completion_tokens"]

    with client.messages.stream(**body, system=system, stop_sequences=["the"]) as stream:
        names = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    kept = [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]
    assert kept == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert [each.to_dict() for each in final.content] == [{"type": "text", "text": block.text}]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "the")
    assert final.usage.output_tokens == message.usage.output_tokens

    short = client.messages.create(**{**body, "max_tokens": 2})
    assert short.stop_reason == "max_tokens"
    long = [{"role": "user", "content": "Once upon a time " * 20}]
    first, second = (client.messages.create(**{**body, "messages": long, "max_tokens": 1}).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_count_tokens(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "tiny", "messages": CHAT, "system": "Tell a story.", "tools": TOOLS}
    counted = client.messages.count_tokens(**body).input_tokens
    assert client.messages.create(**body, max_tokens=1).usage.input_tokens == counted


def test_models(server: LiveServer, client: anthropic.Anthropic) -> None:
    """The path is OpenAI's, too: its clients send no anthropic-version."""
    models = list(client.models.list())
    assert [each.id for each in models] == server.service.names
    model = models[-1]
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert model.max_input_tokens == server.front.max_model_len
    assert client.models.retrieve("tiny").to_dict() == model.to_dict()
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    assert server.client.get("/v1/models").json()["object"] == "list"


def test_the_beginning_of_the_answer_is_continued(server: LiveServer, client: anthropic.Anthropic) -> None:
    begun: list[Any] = [*CHAT, {"role": "assistant", "content": "Once upon a"}]
    message = client.messages.create(model="tiny", messages=begun, max_tokens=5, extra_body={"temperature": 0})
    same = server.post(
        "/v1/chat/completions", messages=begun, max_tokens=5, temperature=0, continue_final_message=True
    ).json()
    assert [block.to_dict()["text"] for block in message.content] == [same["choices"][0]["message"]["content"]]


def test_a_call_and_its_result(client: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "tools": TOOLS}
    choice: Any = {"type": "tool", "name": "paint"}
    message = client.messages.create(**body, messages=CHAT, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name == "paint"
    assert call.input["colour"] in ("red", "blue")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "done"}]}
    messages: list[Any] = [
        *CHAT,
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, *message.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    assert client.messages.create(**body, messages=messages, tool_choice={"type": "none"}).content
    messages[1]["content"][1] = call.to_dict()
    made = chat(messages=messages).messages
    assert [each["role"] for each in made] == ["user", "assistant", "tool", "user"]
    assert made[1]["content"] == "Well."
    assert made[1]["tool_calls"][0]["function"] == {"name": "paint", "arguments": call.input}
    assert (made[2]["tool_call_id"], made[2]["content"]) == (call.id, "done")

    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**body, messages=CHAT, tool_choice=one) as stream:
        final = stream.get_final_message()
    assert [block.to_dict()["name"] in ("paint", "walk") for block in final.content] == [True]


def test_the_budget_of_thinking() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert chat(messages=CHAT, thinking=thinking).thinking_token_budget == 1024
    assert chat(messages=CHAT, thinking={"type": "disabled"}).thinking_token_budget is None


def test_json_output(client: anthropic.Anthropic) -> None:
    schema = {**COLOUR, "additionalProperties": False}
    message = client.messages.create(
        model="tiny",
        messages=CHAT,
        max_tokens=200,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text)["colour"] in ("red", "blue")


def test_thinking_text_and_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerShape, "gate", lambda *_: None)  # the form holds for the reasoning as well
    extra = {"guided_regex": ALL, "temperature": 0}
    body: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 400, "tools": TOOLS}
    with (
        live_server(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        whole = client.messages.create(**body, extra_body=extra)
        with client.messages.stream(**body, extra_body=extra) as stream:
            streamed = stream.get_final_message()
        omitted = client.messages.create(**body, thinking={"type": "adaptive", "display": "omitted"}, extra_body=extra)
    for message in (whole, streamed):
        thinking, text, call = [block.to_dict() for block in message.content]
        assert thinking == {"type": "thinking", "thinking": "She left.", "signature": ""}
        assert text == {"type": "text", "text": "Far away."}
        assert call == {"type": "tool_use", "id": call["id"], "name": "walk", "input": {}}
        assert message.stop_reason == "tool_use"
    assert [block.type for block in omitted.content] == ["text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": whole.content[2].to_dict()["id"], "content": "done"}
    history = [{"role": "assistant", "content": [block.to_dict() for block in whole.content]}]
    made = chat(messages=[*CHAT, *history, {"role": "user", "content": [result]}]).messages
    assert made[1]["reasoning_content"] == "She left."
    assert made[1]["content"] == "Far away."


@pytest.mark.parametrize(("kind", "prompt"), [("enabled", "yes"), ("disabled", "no"), ("adaptive", "default")])
def test_thinking_is_a_switch_of_the_template(server: LiveServer, kind: str, prompt: str) -> None:
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    template = "{% if enable_thinking is defined %}{{ 'yes' if enable_thinking else 'no' }}{% else %}default{% endif %}"
    tokenizer.use_chat_template(template)
    try:
        counted = server.post("/v1/messages/count_tokens", messages=CHAT, thinking={"type": kind}).json()
        assert counted == {"input_tokens": len(tokenizer.encode(prompt, add_special_tokens=False))}
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "models read text alone"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role must be user, assistant or system"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type must be one of auto, any, none, tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is 'required', and tools is empty"),
        ({"thinking": {"type": "often"}}, "thinking.type must be one of"),
        ({"stop_sequences": "a"}, "stop_sequences must be a list"),
        ({"stop_sequences": [""]}, "stop_sequences must be"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format must be"),
        ({"temperature": -1}, "temperature must be"),
    ],
)
def test_bad_requests(server: LiveServer, body: dict[str, Any], message: str) -> None:
    response = server.post("/v1/messages", **{"messages": CHAT, "max_tokens": 5, **body})
    assert response.status_code == 400, response.text
    kind, text = anthropic_error(response)
    assert kind == "invalid_request_error"
    assert message in text


def test_threads(server: LiveServer, client: anthropic.Anthropic) -> None:
    """The client's tool runner starts one by itself; where it cannot go on, the client sends all messages again."""
    body = {"messages": CHAT, "max_tokens": 2}
    created = server.post("/v1/messages", **body, thread={"type": "create"})
    assert (created.status_code, created.headers["x-kvanta-ignored"]) == (200, "thread")
    thread = {"type": "continue", "previous_message_id": created.json()["id"]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = server.post(path, **body, thread=thread)
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert error["details"] == {"error_code": "thread_not_found"}
        assert "send the earlier messages" in error["message"]


def test_errors_are_the_clients_own(server: LiveServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
        client.messages.create(model="claude", messages=CHAT, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="the prompt has"):
        client.messages.create(model="tiny", messages=[{"role": "user", "content": "a " * 5000}], max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        client.with_options(api_key="wrong").messages.create(model="tiny", messages=CHAT, max_tokens=1)
    assert anthropic_error(server.post("/v1/messages/batches"))[0] == "not_found_error"


def test_an_error_ends_a_stream(client: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> AsyncIterator[None]:
        if not _:
            yield
        raise ApiError(504, "too late", code="request_timeout")

    monkeypatch.setattr("kvanta.server.jobs.generation_job.GenerationJob.deltas", fail)
    with (
        pytest.raises(anthropic.APIStatusError, match="too late"),
        client.messages.stream(model="tiny", messages=CHAT, max_tokens=2) as stream,
    ):
        stream.get_final_message()
