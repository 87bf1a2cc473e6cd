"""Refusals of the server: OpenAI's error bodies, limits, keys, a full queue."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, error_of, events, live_server

from kvanta.engine.generation import Generation
from kvanta.errors import QueueFullError
from kvanta.server.http.errors import ApiError

CHAT = [{"role": "user", "content": "Lily"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_no_web_page_may_reset_the_cache(server: LiveServer) -> None:
    response = server.client.post("/reset_prefix_cache", headers={"Origin": "http://elsewhere"})
    assert response.status_code == 403
    assert "web pages" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "empty: give a text, or token ids such as [1]"),
        ({"prompt": []}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"prompt": "a"}}, "prompt"),
        ({"prompt": [{"prompt": "a"}]}, "prompt"),
        ({"prompt": ["a", 1]}, "token ids"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True, False]}, "token ids must be whole numbers"),
        ({"prompt": [[False]]}, "token ids must be whole numbers"),
        ({"prompt": [1, 512]}, "512"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [2**70]}, "token id"),
        ({"prompt": [1] * 512}, "max_model_len"),
        ({"prompt": "a" * 100_000}, "characters"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "five"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5.5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**80}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_k": -7}, "top_k"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "n": 0}, "n must be a whole number in 1..1024, got 0"),
        ({"prompt": "a", "n": 500}, "500 texts"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "--max-logprobs"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "stop_token_ids": "x"}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [512]}, "512"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"9999": 1}}, "9999"),
        ({"prompt": "a", "logit_bias": [1]}, "logit_bias"),
        ({"prompt": "a", "min_tokens": 99}, "min_tokens"),
        ({"prompt": "a", "priority": 2**31}, "priority"),
        ({"prompt": "a", "priority": -1}, "--scheduling-policy priority"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream"),
        ({"prompt": "a", "stream": True, "stream_options": 1}, "stream_options"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "response_format": "json"}, "json_schema"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "json_schema"),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "json"),
        ({"prompt": "a", "guided_regex": "("}, "regex"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, "exclude"),
        ({"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"prompt": "a", "structured_outputs": {"xml": 1}}, "xml"),
        ({"prompt": "a", "guided_choice": []}, "guided_choice"),
        ({"prompt": "a", "max_tokens": -1}, "or null, got -1"),
        ({"prompt": "a", "ignore_eos": "None or True"}, "boolean"),
    ],
)
def test_bad_completions(server: LiveServer, body: dict[str, Any], said: str) -> None:
    data = json.dumps(body)  # with escapes, so that lone surrogates arrive
    response = server.client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert said in error["message"]
    assert error["param"] in body or error["param"] == "prompt" or "exclude" in error["message"], error
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": "Hi"}, "list"),
        ({"messages": ["Hi"]}, "message 0"),
        ({"messages": [{"content": "Hi"}]}, "role"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": CHAT, "top_logprobs": 3}, "logprobs: true"),
        ({"messages": CHAT, "tools": [1]}, "tools"),
        ({"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}, "exclude"),
        ({"messages": CHAT, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": CHAT, "chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_bad_chats(server: LiveServer, body: dict[str, Any], said: str) -> None:
    response = server.post("/v1/chat/completions", **body)
    assert response.status_code == 400
    error = error_of(response)
    assert said in error["message"]
    assert error["param"] in body or "exclude" in error["message"], error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * 900}]}, "messages"),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ("/v1/completions", {"input_ids": [99999]}, "input_ids"),
        ("/v1/completions", {"input_ids": [1] * 600}, "input_ids"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "guided_choice": ["stop", 1]}, "guided_choice"),
        ("/v1/chat/completions", {"messages": CHAT, "response_format": {"type": "regex"}}, "response_format"),
        ("/v1/chat/completions", {"messages": CHAT, "tool_choice": "stop"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/v1/embeddings", {"input": "a", "dimensions": 9999}, "dimensions"),
    ],
)
def test_errors_name_the_requests_own_fields(server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    data = json.dumps(body)  # with escapes, so that lone surrogates arrive
    response = server.client.post(path, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("data", ['{"prompt": "a",}', '{"prompt": "a"', '{"prompt": "a"} x'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"])
def test_what_is_no_json(server: LiveServer, path: str, data: str) -> None:
    response = server.client.post(path, content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert re.fullmatch(r"the body is not valid JSON: .* at character \d+", error["message"])
    assert error["param"] is None


def test_other_statuses(server: LiveServer) -> None:
    missing = server.post("/v1/completions", model="gpt-4", prompt="a")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"
    assert "stories260k" in error_of(missing)["message"]
    assert error_of(server.client.get("/v1/other"))["type"] == "not_found_error"
    assert server.client.get("/v1/completions").headers["Allow"] == "POST"
    both = server.client.delete("/flush_cache")
    assert both.status_code == 405
    assert both.headers["Allow"] == "GET, HEAD, POST"
    assert error_of(both)["message"] == "/flush_cache does not take DELETE; allowed: GET, HEAD, POST"
    for path in ("/", "/page/page.js", "/v1/models"):
        assert server.client.put(path).headers["Allow"] == "GET, HEAD"
    too_long = server.post("/v1/completions", prompt=[1] * 600)
    assert error_of(too_long)["code"] == "context_length_exceeded"
    for data in (b"", b"{", b"[]", b"nul", b"\xff\xfe", b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}"):
        response = server.client.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, data[:20]
        error_of(response)
    compressed = gzip.compress(b'{"prompt": "a"}')
    for coding in ("", "identity"):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        body = b'{"prompt": "a", "max_tokens": 1}'
        assert server.client.post("/v1/completions", content=body, headers=headers).status_code == 200
    for coding in ("br", "identity, gzip"):
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        response = server.client.post("/v1/completions", content=compressed, headers=headers)
        assert (response.status_code, response.headers["Accept-Encoding"]) == (415, "identity, gzip, x-gzip, deflate")
        assert coding in error_of(response)["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_bodies_of_other_types_are_not_taken_from_pages(server: LiveServer, kind: str | None) -> None:
    """litellm names no type for Ollama's API, and `curl -d` a form's; pages can send these to foreign servers."""
    typed = {} if kind is None else {"Content-Type": kind}
    bodies = {
        "/v1/completions": b'{"prompt": "a", "max_tokens": 1}',
        "/api/generate": b'{"model": "stories260k", "prompt": "a", "raw": true, "options": {"num_predict": 1}}',
        "/completion": b'{"prompt": "a", "n_predict": 1}',
    }
    for path, data in bodies.items():
        answer = server.client.post(path, content=data, headers=typed)
        assert answer.status_code == 200, answer.text
    for sender in ({"Origin": "https://example.com"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=typed | sender)
        assert refused.status_code == 400
        assert "Content-Type: application/json" in error_of(refused)["message"]


def test_head(server: LiveServer) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/v1/models/tiny", "/", "/v1/models/none"):
        get, head = server.client.get(path), server.client.head(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        kept = ("content-type", "content-length")
        assert [head.headers.get(name) for name in kept] == [get.headers.get(name) for name in kept]
    assert server.client.head("/v1/completions").status_code == 405


def test_models_with_a_slash(server: LiveServer) -> None:
    assert server.client.get("/v1/models/").json() == server.client.get("/v1/models").json()


def test_deep_nesting(server: LiveServer) -> None:
    """Python reads nearly as deep as it can go, and then has little left for anything else."""
    for depth in (*range(880, 1000, 20), 5000):
        for field in ("prompt", "messages", "logit_bias", "tools", "user", "seed"):
            body = f'{{"prompt": "a", "max_tokens": 1, "messages": [], "{field}": {"[" * depth}1{"]" * depth}}}'
            path = "/v1/chat/completions" if field in ("messages", "tools") else "/v1/completions"
            response = server.client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 400 or (field == "user" and response.status_code == 200), response.text


def test_request_ids(server: LiveServer) -> None:
    given = server.client.get("/health", headers={"X-Request-Id": "my-id.7"})
    assert given.headers["x-request-id"] == "my-id.7"
    for bad in ("a b", "x" * 65, "<script>"):
        made = server.client.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32
    headers = {"X-Request-Id": "abc"}
    answer = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    again = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.json()["id"].startswith("cmpl-abc-")
    assert answer.json()["id"] != again.json()["id"]
    assert answer.headers["x-request-id"] == again.headers["x-request-id"] == "abc"


def test_a_full_queue_and_a_server_that_stops(server: LiveServer) -> None:
    front = server.front
    give_back = server.on_loop(lambda: front.admit(front.capacity))
    full = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert full.status_code == 429
    assert 1 <= int(full.headers["retry-after"]) <= 60
    assert error_of(full)["code"] == "queue_full"
    server.on_loop(give_back)
    server.on_loop(give_back)  # twice is once
    assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
    front.draining = True
    try:
        refused = server.post("/v1/completions", prompt="a")
        for answer in (refused, server.client.get("/health"), server.client.get("/ping")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    finally:
        front.draining = False


def test_the_engines_own_queue_may_be_full(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory lets fewer sequences run than max_num_seqs says."""

    def refuse(*_: Any) -> None:
        raise QueueFullError("the queue is full")

    monkeypatch.setattr(Generation, "add_to", refuse)
    refused = server.post("/v1/completions", prompt="a", n=2)
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    assert server.on_loop(lambda: server.front.admitted) == 0


def test_a_time_limit_ends_a_request(server: LiveServer) -> None:
    front = server.front
    front._time_limit = 1e-6  # seconds
    try:
        late = server.post("/v1/completions", prompt="a", max_tokens=400, ignore_eos=True)
        assert late.status_code == 504
        assert error_of(late)["code"] == "request_timeout"
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            data = list(events(response))
        assert json.loads(data[-2])["error"]["code"] == "request_timeout"
        assert data[-1] == "[DONE]"
    finally:
        front._time_limit = 0.0


def test_an_engine_error_reaches_its_client_alone(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault while taking one request's output must not affect others of the same step."""
    take = Generation.take

    def broken(self: Generation, engine_output: Any) -> str:
        if self.output.prompt_token_ids == [1, 400]:
            raise RuntimeError("boom")
        return take(self, engine_output)

    monkeypatch.setattr(Generation, "take", broken)
    assert server.post("/v1/completions", prompt=[1, 400]).status_code == 500
    assert server.post("/v1/completions", prompt=[1, 401]).status_code == 200


def test_keys_limits_and_origins() -> None:
    cors = {"allow_origins": ["https://a.example"], "allow_methods": ["*"], "allow_headers": ["*"]}
    with live_server(api_keys=["first", "sécond"], max_body_bytes=2000, cors=cors) as running:
        body = {"prompt": "a", "max_tokens": 1}
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"X-Api-Key": "x"},
        ):
            response = running.client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 401
            assert error_of(response)["type"] == "authentication_error"
        for key in ("first", "sécond"):
            authorization = f"Bearer {key}".encode()
            response = running.client.post("/v1/completions", json=body, headers={b"Authorization": authorization})
            assert response.status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert running.client.get(path).status_code == 200
        for path in ("/v1/models", "/openapi.json"):
            assert running.client.get(path).status_code == 401
        signed = {"Authorization": "Bearer first", "Content-Type": "application/json"}
        large = b'{"prompt": "' + b"a" * 3000 + b'"}'
        pieces = [large[:1500], large[1500:]]
        for content in (large, iter(pieces)):  # with a length, and without
            response = running.client.post("/v1/completions", content=content, headers=signed)
            assert response.status_code == 413
            assert "2000" in error_of(response)["message"]
        mine = running.client.get("/v1/models", headers={"Origin": "https://a.example"})
        assert mine.status_code == 401
        assert mine.headers["access-control-allow-origin"] == "https://a.example"
        other = running.client.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_request_for_more_than_the_queue_holds(server: LiveServer) -> None:
    front = server.front
    with pytest.raises(ApiError, match="takes"):
        server.on_loop(lambda: front.admit(front.capacity + 1))


def test_the_document_names_every_metric(server: LiveServer) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/serve.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^# TYPE kvanta:(\S+)", server.client.get("/metrics").text, re.MULTILINE))
    assert names
    for name in names:
        assert f"`{name}" in text, name
