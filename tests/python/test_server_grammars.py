"""Grammars of requests: their own threads, a time limit, and refusals instead of server errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta import InputError
from kvanta.constraints.structured_output import GrammarCompiler

SHORT = {"prompt": "a", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_nobody_waits_for_the_grammar_of_another(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    compile_one = GrammarCompiler._matcher

    def slow(self: GrammarCompiler, grammar: str, kind: str) -> Any:
        if "slow" in grammar:
            assert released.wait(60)
        return compile_one(self, grammar, kind)

    monkeypatch.setattr(GrammarCompiler, "_matcher", slow)
    with ThreadPoolExecutor(8) as clients:
        try:
            slow_one = clients.submit(server.post, "/v1/completions", **SHORT, guided_regex="slow")
            assert server.post("/v1/completions", **SHORT, guided_regex="quick").status_code == 200
            more = [clients.submit(server.post, "/v1/completions", **SHORT, guided_regex=f"slow{i}") for i in range(4)]
            long_prompt = "a b " * 250
            monkeypatch.setattr(
                "kvanta.server.jobs.service._AT_ONCE", 100
            )  # longer prompts are tokenized by other threads
            assert server.post("/tokenize", prompt=long_prompt).status_code == 200
            assert server.post("/v1/completions", **{**SHORT, "prompt": "a " * 200}).status_code == 200
        finally:
            released.set()
        assert {each.result().status_code for each in (slow_one, *more)} == {200}


def test_a_grammar_has_limited_time(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def late(*_: Any) -> Any:
        released.wait(60)
        raise InputError("too late to be read")

    monkeypatch.setattr(GrammarCompiler, "_matcher", late)
    monkeypatch.setattr(server.front, "grammar_seconds", 0.2)
    with ThreadPoolExecutor(8) as clients:
        try:
            posts = [clients.submit(server.post, "/v1/completions", **SHORT, guided_regex=f"late{i}") for i in range(5)]
            answers = [post.result() for post in posts]
        finally:
            released.set()
    assert sorted(answer.status_code for answer in answers) == [400, 400, 503, 503, 503]
    for answer in answers:
        error = error_of(answer)
        if answer.status_code == 400:
            assert "took more than 0.2 s" in error["message"]
            assert error["param"] == "structured_outputs"
        else:
            assert answer.headers["retry-after"]
    assert server.on_loop(lambda: server.front.admitted) == 0


def test_a_form_that_turns_out_too_complex(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def consume_tokens(self, _: Any) -> bool:
            return False

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "Parser Error: too many items"

    monkeypatch.setattr(GrammarCompiler, "matcher", lambda *_: Broken())
    answer = server.post("/v1/completions", **SHORT, guided_regex="a+")
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["message"] == "structured_outputs: the grammar is too complex: Parser Error: too many items"
    assert error["param"] == "structured_outputs"


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": [f"{index * 7919 % 99991} some {index} text" for index in range(12_000)]},
        {"guided_regex": "((a{1,100}){1,100}){1,100}"},
        {"guided_json": {"type": "string", "pattern": "^((a{1,30}b?){1,30}c?){1,30}$"}},
        {"guided_json": {"enum": ["x" * 300_000]}},
        {"guided_regex": "a" * 300_000},
        {"guided_choice": ["a"] * 20_000},
    ],
    ids=lambda form: next(iter(form)),
)
def test_large_forms_are_no_server_error(server: LiveServer, form: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", **SHORT, **form)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert len(error_of(answer)["message"]) < 500
