"""Effects of fields of vLLM's and SGLang's requests. test_field_table.py sends each of them once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta.server.http import hints

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_sglangs_names_for_what_is_here(server: LiveServer) -> None:
    tokens = server.post("/tokenize", prompt="Once upon").json()["tokens"]
    plain = server.completion(prompt="Once upon", temperature=0, max_tokens=8)
    for ids in (tokens, [tokens]):
        assert server.completion(input_ids=ids, temperature=0, max_tokens=8)["choices"] == plain["choices"]
    both = error_of(server.post("/v1/completions", prompt="a", input_ids=tokens))
    assert both["message"] == "give either prompt or input_ids, got both"
    assert "got nothing" in error_of(server.post("/v1/completions", max_tokens=1))["message"]

    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 40, "stop": "the"}
    trimmed, kept = (server.completion(**body, no_stop_trim=each)["choices"][0]["text"] for each in (False, True))
    assert kept == trimmed + "the"
    assert server.completion(**body, include_stop_str_in_output=True)["choices"][0]["text"] == kept
    assert server.post("/v1/completions", **body, no_stop_trim="yes").status_code == 400

    def cached(**fields: Any) -> int:
        usage = server.completion(prompt="Once upon a time " * 30, max_tokens=1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(extra_key="k") == 0
    assert cached(extra_key="k") > 0
    assert cached(extra_key="other") == 0
    assert cached(extra_key="k", cache_salt="s") == 0


def test_modalities_of_texts(server: LiveServer) -> None:
    chat = {"messages": CHAT, "max_tokens": 2}
    assert server.post("/v1/chat/completions", **chat, modalities=["text"]).status_code == 200
    refused = error_of(server.post("/v1/chat/completions", **chat, modalities=["text", "audio"]))
    assert refused["param"] == "modalities"


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{% set e = reasoning_effort | default('x') %}{{ e }}", "high", "high"),
        ("{% if enable_thinking is defined and not enable_thinking %}no{% else %}yes{% endif %}", "none", "no"),
        ("{% if thinking is defined and not thinking %}no{% else %}yes{% endif %}", "none", "no"),
        ("{% if enable_thinking is defined %}no{% else %}yes{% endif %}", "medium", "yes"),
        ("{% if enable_thinking is defined %}no{% else %}yes{% endif %}", "high", "yes"),
        ("yes", "none", "yes"),
    ],
)
def test_reasoning_effort_is_for_the_template(server: LiveServer, template: str, effort: str, prompt: str) -> None:
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    tokenizer.use_chat_template(template)
    try:
        response = server.post("/tokenize", messages=CHAT, reasoning_effort=effort)
        assert tokenizer.decode(response.json()["tokens"]) == prompt
        is_read = effort == "medium" or "reasoning_effort" in template or (effort == "none" and "thinking" in template)
        assert response.headers.get("x-kvanta-ignored") == (None if is_read else "reasoning_effort")
    finally:
        tokenizer.chat_template = kept


def test_hints_are_named_and_logged_once(
    server: LiveServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "_logged", set())  # other tests of this process may have filled it
    fields = {"colour_of_the_day": "red", "metadata": {"a": "b"}, "rid": None, "priority": 0}
    with caplog.at_level(logging.WARNING, "kvanta.server"):
        for _ in range(3):
            answer = server.post("/v1/completions", prompt="a", max_tokens=1, **fields)
            assert answer.headers["x-kvanta-ignored"] == "colour_of_the_day, metadata"
    said = [record.getMessage() for record in caplog.records]
    assert said.count("a request has 'colour_of_the_day', which has no effect: the field is unknown") == 1
    assert len(said) <= 2
