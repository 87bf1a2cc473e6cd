"""Whole sessions of agents: first request, calls, results, errors, an interruption, compaction, a cancelled stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from agent_bodies import CHAT_AGENTS, chat_history, claude_code, codex, functions
from live_server import LiveServer, live_server, wait_until_idle

FEW = 8  # tokens of an answer: the model's context has 512


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    options = {"max_model_len": 512}
    with live_server(tool_call_parser="hermes", notes_unread=True, options=options) as running:
        running.service.names = ["tiny", "*"]
        yield running


def answered(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    """The request gets 200, and its stream ends as the API's streams end."""
    with server.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    if body.get("stream"):
        assert lines[-1] == "data: [DONE]" or '"type":"response.' in lines[-1] or '"message_stop"' in lines[-1], lines[
            -1
        ]
        assert not any('"error":{' in line for line in lines if "response.incomplete" not in line)


@pytest.mark.parametrize("agent", CHAT_AGENTS)
@pytest.mark.parametrize("developer", [False, True])
def test_sessions_of_chats(server: LiveServer, agent: str, developer: bool) -> None:
    fields = dict(CHAT_AGENTS[agent])
    parts, strict = fields.pop("parts", False), fields.pop("strict", None)
    tools = functions(strict=strict) if fields.pop("tools", True) else None
    for name in ("max_tokens", "max_completion_tokens"):
        fields |= {name: FEW} if name in fields else {}
    fields.setdefault("max_tokens", FEW)
    for messages in chat_history(parts=parts, developer=developer):
        body = {"model": "any-model", "messages": messages, **({"tools": tools} if tools else {}), **fields}
        answered(server, "/v1/chat/completions", body)


def test_a_session_of_claude_code(server: LiveServer) -> None:
    for body in claude_code():
        if "tools" in body:
            body["tools"] = body["tools"][:1] + body["tools"][2:]  # the context is small
        answered(
            server,
            "/v1/messages",
            {**body, "max_tokens": min(body["max_tokens"], 60 if "temperature" in body else FEW)},
        )
        counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking") if name in body}
        count = server.post("/v1/messages/count_tokens", **counted)
        assert count.status_code == 200, count.text
        assert count.json()["input_tokens"] > 0
    models = server.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]


def test_a_session_of_codex(server: LiveServer) -> None:
    for body in codex():
        tools = [tool for tool in body["tools"] if tool["type"] != "namespace"]  # the context is small
        answered(server, "/v1/responses", {**body, "tools": tools, "max_output_tokens": FEW})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_client_that_leaves_ends_its_request(server: LiveServer, path: str) -> None:
    body: dict[str, Any] = {"model": "x", "stream": True}
    if path.endswith("responses"):
        body |= {"input": "Lily", "max_output_tokens": 400}
    else:
        body |= {"messages": [{"role": "user", "content": "Lily"}], "max_tokens": 400}
    with server.client.stream("POST", path, json=body) as response:
        for line in response.iter_lines():
            if "delta" in line:
                break
    wait_until_idle(server)


def test_hints_of_claude_code_are_named(server: LiveServer) -> None:
    body = next(body for body in claude_code() if "tools" in body)
    answer = server.post("/v1/messages", **{**body, "tools": body["tools"][2:], "max_tokens": FEW, "stream": False})
    names = answer.headers["x-kvanta-ignored"].split(", ")
    assert {"context_management", "output_config.effort", "tools[web_search_20250305]"} <= set(names)
    assert json.loads(answer.content)["type"] == "message"
