"""`--root-path`: routes, keys, errors, metrics and the log see the same path, whatever prefix a proxy removes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from live_server import live_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from kvanta.server.http.access import OPEN_PATHS, OPEN_PREFIX, AccessControl

KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": "a", "max_tokens": 1}
ROOTS = ["", "/", "/api", "/api/", "/page", "/page/", "/health", "/v1", "/v1/", "/p", "/page/v1"]
PATHS = ["", "*", "completions", "/completions", "/v1/completions", "/page", "/page/main.js", "/page/v1/completions"]
PATHS += [*sorted(OPEN_PATHS), "/api/health", "/api/v1/completions", "/health/v1/completions", "//health", "/healthy"]
PATHS += ["/v1/page/", "/v1/page/a", "/pages", "//page/", "h", "e/main.js"]


@pytest.mark.parametrize("root", ["", "/page", "/health", "/api", "/v1/"])
def test_a_prefix_changes_nothing(root: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvanta.server")
    settings: dict[str, Any] = {"api_keys": ["secret"], "log_requests": True, "unlogged_paths": ["/metrics"]}
    with live_server(root_path=root, **settings) as server:
        client = server.client
        for path in ("/health", "/metrics", "/version", "/", "/page/main.js"):
            assert client.get(path).status_code == 200, path
        for path in ("/v1/completions", "/tokenize"):
            assert client.post(path, json=BODY).status_code == 401
            assert client.post(path, json=BODY, headers=KEY).status_code == 200
        for headers, status in (({}, 401), (KEY, 400)):
            refused = client.post("/v1/messages", json={"messages": []}, headers=headers)
            assert refused.status_code == status
            assert refused.json()["type"] == "error"  # Anthropic's shape
        if root:  # a proxy that does not remove the prefix
            assert client.post(root.rstrip("/") + "/v1/completions", json=BODY).status_code in (401, 404)
        seen = server.on_loop(lambda: dict(server.front.metrics.responses))
        assert seen["/health", "200"] == seen["/v1/completions", "200"] == seen["/v1/completions", "401"] == 1
    assert any("/v1/completions" in each.message for each in caplog.records)
    assert not any("/metrics" in each.message for each in caplog.records)


def status_and_route(app: AccessControl, root: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """The answer to one request as uvicorn passes it on: with the prefix in front of its path."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": root + path, "root_path": root, "query_string": b""}
    asyncio.run(app({**scope, "headers": raw, "scheme": "http", "server": ("localhost", 80)}, receive, send))
    return sent[0]["status"], sent[1]["body"].decode()


@pytest.mark.parametrize("root", ROOTS)
def test_keys_are_needed_for_all_routes_but_the_open_ones(root: str) -> None:
    """The route that answers without a key is an open one, whichever path is called under whichever prefix."""

    def say(text: str) -> Any:
        async def answer(_: Request) -> Response:
            return PlainTextResponse(text)

        return answer

    opened = [Route(path, say("open")) for path in (*OPEN_PATHS, OPEN_PREFIX + "{name:path}")]
    routes = Starlette(routes=[*opened, Route("/{rest:path}", say("closed"))])
    keyed = AccessControl(routes, ["secret"], 1024)
    for path in PATHS:
        status, route = status_and_route(keyed, root, path, KEY)
        assert (status, route) in ((200, "open"), (200, "closed"), (404, "Not Found"), (307, "")), path
        without, _ = status_and_route(keyed, root, path, {})
        assert without == (200 if route == "open" else 401), path
