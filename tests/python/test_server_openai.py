"""The `openai` client, unchanged, against the server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from live_server import LiveServer, live_server

KEY = "sk-test"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(api_keys=[KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="stories260k", prompt="Once upon a time", max_tokens=12, temperature=0)
    assert whole.choices[0].text.startswith(", there was a little girl")
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    pieces = client.completions.create(
        model="stories260k", prompt="Once upon a time", max_tokens=12, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="stories260k",
        messages=[{"role": "user", "content": "Lily"}],
        max_completion_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.content or []) == 8
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    chunks = list(
        client.chat.completions.create(
            model="stories260k",
            messages=[{"role": "user", "content": "Lily"}],
            max_completion_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


@pytest.mark.parametrize("choice", ["required", "paint"])
def test_a_call_in_a_stream_is_done(client: openai.OpenAI, choice: str) -> None:
    """The client reports it only if the finish reason comes after it."""
    schema = {"type": "object", "properties": {"colour": {"enum": ["red"]}}, "required": ["colour"]}
    with client.chat.completions.stream(
        model="stories260k",
        messages=[{"role": "user", "content": "Lily"}],
        tools=[{"type": "function", "function": {"name": "paint", "parameters": schema}}],
        tool_choice="required" if choice == "required" else {"type": "function", "function": {"name": choice}},
        parallel_tool_calls=False,
        max_completion_tokens=100,
        temperature=0,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls or []
    assert [(event.name, event.arguments) for event in done] == [("paint", call.function.arguments)]
    assert final.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stories260k", "tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_are_the_clients_own(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="stories260k"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client.with_options(api_key="wrong").models.list()
    give_back = server.on_loop(lambda: server.front.admit(server.front.capacity))
    try:
        with pytest.raises(openai.RateLimitError, match="queue"):
            client.completions.create(model="tiny", prompt="a")
    finally:
        server.on_loop(give_back)
