"""Whose part of the tokens a request takes, with --fair-by: its user's, as clients name it, or its API key's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, live_server

from kvanta.engine.embedding import Embedding
from kvanta.engine.generation import Generation
from kvanta.server.run import warn_if_unfair

USER = {"role": "user", "content": "a"}
SHORT = {"max_tokens": 1}


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The users of the texts and embeddings that are queued."""
    seen: list[str] = []
    for kind in (Generation, Embedding):

        def add_to(self: Any, engine: Any, *args: Any, add: Any = kind.add_to) -> None:
            seen.append(args[-1])
            add(self, engine, *args)

        monkeypatch.setattr(kind, "add_to", add_to)
    return seen


@pytest.fixture(scope="module")
def by_user() -> Iterator[LiveServer]:
    with live_server(fair_by="user", options={"fair_by": "user"}) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", **SHORT, "user": "ann"}),
        ("/v1/chat/completions", {"messages": [USER], **SHORT, "safety_identifier": "ann", "user": "other"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1, "user": "ann"}),
        ("/v1/messages", {"messages": [USER], **SHORT, "metadata": {"user_id": "ann"}}),
        ("/v1/embeddings", {"input": "a", "user": "ann"}),
    ],
)
def test_users_are_those_of_the_request(by_user: LiveServer, users: list[str], path: str, body: dict[str, Any]) -> None:
    response = by_user.post(path, model="tiny", **body)
    assert response.status_code == 200, response.text
    assert users == ["ann"]


def test_requests_without_a_user_share_a_part(by_user: LiveServer, users: list[str]) -> None:
    by_user.completion(prompt="a", **SHORT)
    assert users == [""]


def test_keys_are_users_whom_no_log_can_name(users: list[str]) -> None:
    with live_server(fair_by="api-key", api_keys=["one", "two"], options={"fair_by": "api-key"}) as server:
        for key, header in (("one", "Authorization"), ("two", "x-api-key"), ("one", "x-api-key")):
            headers = {header: f"Bearer {key}" if header == "Authorization" else key}
            body = {"prompt": "a", **SHORT, "user": "ann"}
            assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    first, second, third = users
    assert first == third != second
    assert "one" not in first


def test_equal_users_of_two_keys_are_two(users: list[str]) -> None:
    with live_server(fair_by="user", api_keys=["one", "two"], options={"fair_by": "user"}) as server:
        for key, user in (("one", "ann"), ("two", "ann"), ("one", "ann"), ("one", "bob")):
            body = {"prompt": "a", **SHORT, "user": user}
            headers = {"Authorization": f"Bearer {key}"}
            assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert users[0] == users[2]
    assert len(set(users)) == 3


def test_one_key_alone_is_no_reason_to_be_fair(caplog: pytest.LogCaptureFixture) -> None:
    for keys, words in (["one"], True), (["one", "two"], False):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvanta.server"):
            warn_if_unfair("api-key", keys)
        assert ("--fair-by api-key has no effect" in caplog.text) == words


def test_a_server_that_is_not_fair_looks_at_no_user(users: list[str]) -> None:
    with live_server() as server:
        server.completion(prompt="a", user="ann", **SHORT)
    assert users == [""]
