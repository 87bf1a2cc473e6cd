"""/v1/responses, with OpenAI's unchanged client and by hand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from live_server import LiveServer, error_of, live_server
from openai.types.responses import FunctionToolParam, ResponseInputParam, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict

from kvanta.parsers.answer import AnswerShape
from kvanta.server.http.errors import ApiError
from kvanta.server.openai.responses_request import ResponsesRequest

PAINT: FunctionToolParam = {
    "type": "function",
    "name": "paint",
    "description": "Paints.",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
    "strict": None,
}
WALK: FunctionToolParam = {"type": "function", "name": "walk", "parameters": None, "strict": None}
ALL = 'She left\\.</think>\n\nFar away\\.<tool_call>\\{"name": "walk", "arguments": \\{\\}\\}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tool_call_parser="hermes") as running:
        yield running


@pytest.fixture(scope="module")
def reasoning() -> Iterator[LiveServer]:
    """A server whose forms hold for the reasoning as well: they stand in for a model that was trained to reason."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerShape, "gate", lambda *_: None)
        with live_server(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as running:
            yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_create(server: LiveServer, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny",
        input="Lily",
        instructions="Tell a story.",
        max_output_tokens=8,
        temperature=0,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        metadata={"a": "b"},
        extra_body={"ignore_eos": True},
    )
    messages = [{"role": "system", "content": "Tell a story."}, {"role": "user", "content": "Lily"}]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=8, temperature=0, ignore_eos=True).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.metadata == {"a": "b"}
    (message,) = response.output
    assert message.type == "message"
    (text,) = message.content
    assert text.type == "output_text"
    assert text.logprobs is not None
    assert [len(entry.top_logprobs) for entry in text.logprobs] == [2] * 8


def summary(events: list[ResponseStreamEvent]) -> list[str]:
    """The types of the events, without repetitions."""
    assert [event.sequence_number for event in events] == [*range(len(events))]
    names = [event.type.removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


def test_stream(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "Lily", "temperature": 0, "extra_body": {"stop": ["I"]}}
    with client.responses.stream(**body, include=["message.output_text.logprobs"]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert summary(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    whole = client.responses.create(**body)
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    pieces = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    (done,) = [event.logprobs for event in events if event.type == "response.output_text.done"]
    assert 0 < sum(map(len, pieces)) <= len(done) <= final.usage.output_tokens


class Painting(BaseModel):
    model_config = ConfigDict(extra="forbid")
    colour: Literal["red", "blue"]


def test_parse(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny", input="Lily", text_format=Painting, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Painting)


def test_a_call_and_its_result(server: LiveServer, client: openai.OpenAI) -> None:
    items: ResponseInputParam = [{"role": "user", "content": [{"type": "input_text", "text": "Paint."}]}]
    body: dict[str, Any] = {"model": "tiny", "tools": [PAINT, WALK], "max_output_tokens": 200}
    choice = {"type": "function", "name": "paint"}
    with client.responses.stream(input=items, tool_choice=choice, temperature=0, **body) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert summary(events) == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    (call,) = response.output
    assert call.type == "function_call"
    assert call.name == "paint"
    assert json.loads(call.arguments)["colour"] in ("red", "blue")
    items += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    assert client.responses.create(input=items, tool_choice="none", **body).output_text
    messages = ResponsesRequest(input=items).chat().messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == call.call_id

    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "walk"}]}
    response = client.responses.create(input=items, tool_choice=allowed, parallel_tool_calls=False, **body)
    assert [item.name for item in response.output if item.type == "function_call"] == ["walk"]
    function = {"type": "function", "function": {"name": "walk"}}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Go."}],
        "max_tokens": 200,
        "parallel_tool_calls": False,
    }
    tools = [{"type": "function", "function": {"name": name}} for name in ("paint", "walk")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}}
    message = server.post("/v1/chat/completions", **chat, tools=tools, tool_choice=allowed).json()["choices"][0]
    assert [call["function"]["name"] for call in message["message"]["tool_calls"]] == ["walk"]
    allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "fly"}}]
    error = error_of(server.post("/v1/chat/completions", **chat, tools=tools, tool_choice=allowed))
    assert error["param"] == "tool_choice"
    assert "'fly'; tools has: paint, walk" in error["message"]


def test_reasoning_text_and_a_call(reasoning: LiveServer) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "Lily", "max_output_tokens": 400, "temperature": 0}
    with openai.OpenAI(base_url=f"{reasoning.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"guided_regex": ALL}
        whole = client.responses.create(**body, tools=[WALK], extra_body=extra)
        with client.responses.stream(**body, tools=[WALK], extra_body=extra) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        hidden = client.responses.create(**body, tools=[WALK], extra_body={**extra, "include_reasoning": False})
    for response in (whole, streamed):
        thought, message, call = response.output
        assert thought.type == "reasoning"
        assert [part.text for part in thought.content or []] == ["She left."]
        assert message.type == "message"
        assert response.output_text == "\n\nFar away."
        assert call.type == "function_call"
        assert (call.name, call.arguments) == ("walk", "{}")
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert [item.type for item in hidden.output] == ["message", "function_call"]
    names = [name for name in summary(events) if name.startswith("reasoning_text")]
    assert names == ["reasoning_text.delta", "reasoning_text.done"]
    items = [item.to_dict() for item in whole.output]
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "done"})
    messages = ResponsesRequest(input=items).chat().messages
    assert [message["role"] for message in messages] == ["assistant", "tool"]
    assert messages[0]["reasoning_content"] == "She left."
    assert messages[0]["content"] == "\n\nFar away."


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input: Field required"),
        ({"input": []}, "input", "input must be a text or a list of items, got []"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "models read text alone"),
        ({"input": [{"role": "boss", "content": "a"}]}, "input", "input[0].role must be one of user"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "item_reference is not supported"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"input": "a", "tool_choice": "all"}, "tool_choice", "got 'all'"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format", "text.format is"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs", "top_logprobs needs include"),
        ({"input": "a", "include": ["everything", 1]}, "include", "include must be a list of texts"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata", "metadata must be"),
        ({"input": "a", "temperature": -1}, "temperature", "temperature must be"),
        ({"input": "a", "tools": [{**WALK, "strict": 1}]}, "tools", "strict of a function must be"),
    ],
)
def test_bad_requests(server: LiveServer, body: dict[str, Any], param: str, message: str) -> None:
    response = server.post("/v1/responses", **body)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert message in error["message"]
    assert error["param"] == param


def test_an_error_ends_a_stream(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> AsyncIterator[None]:
        if not _:
            yield
        raise ApiError(504, "too late", code="request_timeout")

    monkeypatch.setattr("kvanta.server.jobs.generation_job.GenerationJob.deltas", fail)
    response = server.post("/v1/responses", input="Lily", stream=True)
    *_, name, data = response.text.split("\n")[:-2]
    assert name == "event: response.failed"
    event = json.loads(data.removeprefix("data: "))
    assert event["sequence_number"] == 2
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "too late"}


@pytest.mark.parametrize("choice", ["auto", "none", {"type": "function", "name": "walk"}])
def test_input_tokens(client: openai.OpenAI, choice: Any) -> None:
    body: dict[str, Any] = {"input": "Lily", "instructions": "Tell a story.", "tools": [PAINT, WALK]}
    counted = client.responses.input_tokens.count(model="tiny", tool_choice=choice, **body)
    assert counted.object == "response.input_tokens"
    created = client.responses.create(model="tiny", tool_choice=choice, max_output_tokens=1, **body)
    assert created.usage is not None
    assert created.usage.input_tokens == counted.input_tokens
    assert counted.input_tokens > client.responses.input_tokens.count(model="tiny", input="Lily").input_tokens


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": "a", "previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"input": "a" * 100_000}, 400, "input"),
    ],
)
def test_input_tokens_of_bad_requests(server: LiveServer, body: dict[str, Any], status: int, param: str) -> None:
    response = server.post("/v1/responses/input_tokens", **body)
    assert response.status_code == status
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/classify", "models have no classification heads; /score and /rerank compare embeddings"),
        ("/pooling", "use /v1/embeddings"),
        ("/v1/responses/resp_1", "nothing is stored"),
        ("/v1/responses/resp_1/cancel", "nothing is stored"),
        ("/v1/audio/transcriptions", "models generate text, without pictures or sound"),
        ("/v1/messages/batches", "send the requests themselves"),
        ("/lora-adapters", "LoRA adapters are not supported; merge them into the weights"),
        ("/generate_stream", "use /generate"),
        ("/get_load", "use /load, or /metrics"),
    ],
)
def test_endpoints_of_other_servers_name_what_there_is(server: LiveServer, path: str, instead: str) -> None:
    response = server.post(path)
    assert response.status_code == 404
    message = response.json()["error"]["message"]
    assert message.startswith(f"there is no endpoint {path}: {instead}")


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_no_answer_could_repeat(server: LiveServer, stream: bool) -> None:
    """1e999 is JSON, and infinite in Python."""
    tool = '{"type": "function", "name": "f", "parameters": {"properties": {"x": {"maximum": 1e999, "minimum": 2.5}}}}'
    body = f'{{"input": "Lily", "max_output_tokens": 1, "tools": [{tool}], "stream": {json.dumps(stream)}}}'
    response = server.client.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200
    assert "Infinity" not in response.text
    assert '"properties":{"x":{"maximum":null,"minimum":2.5}}' in response.text


def test_unknown_paths_name_the_endpoints(server: LiveServer) -> None:
    missing = error_of(server.post("/v1/response"))
    assert missing["message"].startswith("there is no endpoint /v1/response; known: ")
    known = missing["message"].partition("known: ")[2].split(", ")
    assert {"/v1/responses", "/v1/models/{name}", "/ping", "/get_model_info", "/get_server_info"} <= {*known}
    assert len({*known}) == len(known)
    response = server.client.get("/v1/responses")
    assert response.status_code == 405
    assert error_of(response)["message"] == "/v1/responses does not take GET; allowed: POST"
