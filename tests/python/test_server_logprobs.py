"""Log-probabilities of completions, echoes and streams over HTTP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from live_server import LiveServer, live_server
from test_server import PROMPT, expected, stream

from kvanta import LLM, SamplingParams, _core


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories260k", kv_cache_memory_bytes="16MiB", threads=1)


def test_logprobs(server: LiveServer, llm: LLM) -> None:
    direct = expected(llm, temperature=0.0, max_tokens=6, logprobs=2)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 2}
    logprobs = server.completion(**body)["choices"][0]["logprobs"]
    values = [entry[token].logprob for token, entry in zip(direct.token_ids, direct.logprobs, strict=True)]
    assert logprobs["token_logprobs"] == values
    assert "".join(logprobs["tokens"]) == direct.text
    assert logprobs["text_offset"][:3] == [0, 1, 7]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    joined: dict[str, list[Any]] = {key: [] for key in logprobs}
    for chunk in stream(server, "/v1/completions", **body):
        for key, entries in chunk["choices"][0]["logprobs"].items():
            joined[key] += entries
    assert joined == logprobs
    by_id = server.completion(**body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["tokens"]
    assert by_id == [f"token_id:{token}" for token in direct.token_ids]


def test_echo_is_what_lm_eval_reads(server: LiveServer, llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))[0]
    body = {"prompt": [output.prompt_token_ids], "temperature": 0, "echo": True, "logprobs": 1}
    for max_tokens in (1, 0):
        answer = server.completion(**body, max_tokens=max_tokens)
        (choice,) = answer["choices"]
        assert choice["text"] == PROMPT + output.outputs[0].text * max_tokens
        assert len(choice["logprobs"]["tokens"]) == 5 + max_tokens
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert output.prompt_logprobs is not None
        for position in range(1, 5):
            entry = output.prompt_logprobs[position]
            assert entry is not None
            token = output.prompt_token_ids[position]
            assert choice["logprobs"]["token_logprobs"][position] == entry[token].logprob
        assert answer["usage"]["completion_tokens"] == max_tokens
    first = stream(server, "/v1/completions", **body, max_tokens=1)[0]["choices"][0]
    assert len(first["logprobs"]["tokens"]) == 6


def test_echoes_of_a_stream_wait_for_the_prompts_logprobs(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with text 0's first token, before which another text may end: its prompt may be cached."""
    late: list[Any] = []

    def pass_on_later(turns: int) -> None:
        if turns:
            server.loop.call_soon(pass_on_later, turns - 1)
        else:
            pass_on(late)

    def text_0_last(outputs: Sequence[Any]) -> None:
        of_0 = [each.id.endswith("-0") for each in outputs]
        late.extend(itertools.compress(outputs, of_0))
        pass_on([each for each, is_0 in zip(outputs, of_0, strict=True) if not is_0])
        if any(each.finish != _core.FinishReason.NONE for each in itertools.compress(outputs, of_0)):
            pass_on_later(50)  # iterations of the event loop, in which the stream has time for the other text

    pass_on = server.front._pass_on
    body = {"prompt": PROMPT, "n": 2, "seed": 1, "max_tokens": 3, "ignore_eos": True, "echo": True, "logprobs": 1}
    expected = [choice["logprobs"]["token_logprobs"] for choice in server.completion(**body)["choices"]]
    monkeypatch.setattr(server.front, "_pass_on", text_0_last)
    found: list[list[float | None]] = [[], []]
    for chunk in stream(server, "/v1/completions", **body):
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert late
    assert found == expected
    assert None not in found[1][1:]


@pytest.mark.parametrize("prompt", ["Once upon a time, there was", "日本 😀 and Lily ran"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_index_the_text(server: LiveServer, llm: LLM, prompt: str, as_ids: bool) -> None:
    given: Any = llm.tokenizer.encode(prompt) if as_ids else prompt
    body = {"prompt": given, "temperature": 0, "max_tokens": 6, "echo": True, "logprobs": 0}
    (choice,) = server.completion(**body)["choices"]
    text, names, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert (names[0], offsets[0]) == ("<s>", 0)
    assert len(names) == len(offsets)
    for name, offset in list(zip(names, offsets, strict=True))[2:]:  # the first word's space is not in the text
        if "\ufffd" not in name:
            assert text[offset:].startswith(name)
    assert sorted(offsets) == offsets
    joined = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in stream(server, "/v1/completions", **body)]
    assert [offset for part in joined for offset in part] == offsets
