"""stop_regex: the text ends after the first match, however it is split into pieces, and no pattern takes long."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, events, live_server
from stories import GREEDY, PROMPT

from kvanta import LLM, InputError
from kvanta.constraints.stop_regex import StopPatterns

TEXT = "Preis: 12 €, danach 345 Euro.\nEnde"


def pieces(text: str, size: int) -> Iterator[str]:
    return (text[begin : begin + size] for begin in range(0, len(text), size))


@pytest.mark.parametrize(
    ("patterns", "end", "found"),
    [
        ([r"\d{3}"], "345", r"\d{3}"),
        ([r"\d+ Euro", "€"], "€", "€"),
        (["(?i)EURO"], "Euro", "(?i)EURO"),
        ([r"(Euro|Ende)\."], "Euro.", r"(Euro|Ende)\."),
        ([r"r.\n"], None, None),
        ([r"\.\nE"], "\nE", r"\.\nE"),
        (["[^a-z,.: ]{2}$"], "12", "[^a-z,.: ]{2}$"),
        ([], None, None),
    ],
)
def test_the_first_match_ends_the_text(patterns: list[str], end: str | None, found: str | None) -> None:
    compiled = StopPatterns(patterns)
    for size in (1, 2, 5, len(TEXT)):
        search = compiled.search()
        shown = "".join(search.add(piece) for piece in pieces(TEXT, size))
        assert shown == (TEXT if end is None else TEXT[: TEXT.index(end) + len(end)])
        assert search.found == found


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|b)*a(a|b){200}c", "(.*a){100}c", "(?:a?){60}a{60}c"])
def test_patterns_that_backtracking_never_finishes(pattern: str) -> None:
    search = StopPatterns([pattern]).search()
    assert search.add("a" * 3000) == "a" * 3000
    assert search.found is None


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("[", "unclosed character class"),
        ("a)(b", "unopened group"),
        ("a*", "matches the empty text"),
        (r"\bfoo", "lookarounds not supported yet"),
        ("^foo", "lookarounds not supported yet"),
        (r"(a)\1", "backreferences are not supported"),
    ],
)
def test_patterns_that_cannot_be_used(pattern: str, reason: str) -> None:
    with pytest.raises(InputError, match=r"^stop_regex has ") as caught:
        StopPatterns([pattern])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_is_too_complex() -> None:
    search = StopPatterns(["(.{1,500}){1,500}Q"]).search()
    with pytest.raises(InputError, match="too complex for this text"):
        search.add("aab" * 2000)


def test_generate(llm: LLM) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    word = max(whole.split(), key=len)
    params = dataclasses.replace(GREEDY, stop_regex=["zzz", f"{word[:-1]}[a-z]"])
    text = llm.generate(PROMPT, params)[0].outputs[0]
    assert text.text == whole[: whole.index(word) + len(word)]
    assert (text.finish_reason, text.stop_reason) == ("stop", f"{word[:-1]}[a-z]")
    late = dataclasses.replace(params, min_tokens=GREEDY.max_tokens or 0)
    assert llm.generate(PROMPT, late)[0].outputs[0].finish_reason == "length"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_server(server: LiveServer) -> None:
    body: dict[str, Any] = {"prompt": "Once upon", "temperature": 0, "max_tokens": 40}
    whole = server.completion(**body)["choices"][0]["text"]
    text = whole[: whole.index("the") + 3]
    choice = server.completion(**body, stop_regex="t.e")["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", "t.e")
    with server.client.stream(
        "POST", "/v1/completions", json={**body, "stop_regex": "t.e", "stream": True}
    ) as response:
        assert sum(data.count('"finish_reason":"stop"') for data in events(response)) == 1
    params = {"max_new_tokens": 40, "temperature": 0, "stop_regex": ["t.e"]}
    answer = server.post("/generate", text="Once upon", sampling_params=params).json()
    assert answer["text"] == text
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "t.e"}
    refused = error_of(server.post("/v1/completions", **body, stop_regex="["))
    assert (refused["param"], refused["message"]) == ("stop_regex", "stop_regex has '[': unclosed character class")
    complex_pattern = error_of(server.post("/v1/completions", **body, stop_regex="(.{1,500}){1,500}Q"))
    assert complex_pattern["param"] == "stop_regex"
