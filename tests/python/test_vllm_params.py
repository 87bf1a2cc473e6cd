"""Fields of vLLM's SamplingParams beyond the usual ones, in Python and over HTTP."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from live_server import LiveServer, error_of, events, live_server
from stories import GREEDY, PROMPT

from kvanta import LLM, FlatLogprobs, InputError, RepetitionDetectionParams, SamplingParams
from kvanta.outputs import CompletionOutput
from kvanta.params.repetition import RepetitionDetector

IDS = [5, 300, 7]


def first(llm: LLM, **fields: Any) -> CompletionOutput:
    return llm.generate(PROMPT, dataclasses.replace(GREEDY, **fields))[0].outputs[0]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_logprobs_of_given_tokens(llm: LLM) -> None:
    every = first(llm, logprobs=int(llm.model_info.vocab)).logprobs
    for fields in ({}, {"logprobs": len(IDS)}):
        scored = first(llm, logprob_token_ids=IDS, **fields)
        assert scored.logprobs
        for token, found, whole in zip(scored.token_ids, scored.logprobs, every or [], strict=True):
            assert [*found] == [token, *(each for each in IDS if each != token)]
            assert found == {each: whole[each] for each in found}
    assert first(llm, logprob_token_ids=[]).logprobs is None
    for wrong in ({"logprobs": 2}, {"logprob_token_ids": [512]}, {"logprob_token_ids": list(range(129))}):
        with pytest.raises(InputError, match="logprob"):
            first(llm, **{"logprob_token_ids": IDS, **wrong})


def test_logprobs_of_given_tokens_over_http(server: LiveServer) -> None:
    names = {server.front.tokenizer.token_text(token) for token in IDS}
    body: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprob_token_ids": IDS}
    choice = server.completion(**body, prompt="Once", logprobs=1)["choices"][0]
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert top.keys() == {token, *names}
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for entry in server.post("/v1/chat/completions", **body, **chat, logprobs=True).json()["choices"][0]["logprobs"][
        "content"
    ]:
        assert {each["token"] for each in entry["top_logprobs"]} == {entry["token"], *names}
    assert error_of(server.post("/v1/chat/completions", **body, **chat))["param"] == "logprob_token_ids"

    params = {"max_new_tokens": 3, "temperature": 0}
    request = {"text": "Once", "sampling_params": params, "token_ids_logprob": IDS}
    meta = server.post("/generate", **request, return_logprob=True).json()["meta_info"]
    assert [[entry[1] for entry in position] for position in meta["output_token_ids_logprobs"]] == [IDS] * 3
    assert [entry[0] for entry in meta["output_token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    for wrong in (
        {},
        {"return_logprob": True, "top_logprobs_num": 1},
        {"return_logprob": True, "logprob_start_len": 0},
    ):
        assert error_of(server.post("/generate", **request, **wrong))["param"] == "token_ids_logprob"
    no_list = error_of(server.post("/generate", **{**request, "token_ids_logprob": 5, "return_logprob": True}))
    assert no_list["message"] == "token_ids_logprob must be a list of token ids or null, got 5"


def test_flat_logprobs(llm: LLM) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2}
    plain = llm.generate(PROMPT, dataclasses.replace(GREEDY, **fields))[0]
    flat = llm.generate(PROMPT, dataclasses.replace(GREEDY, **fields, flat_logprobs=True))[0]
    new, prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
    assert isinstance(new, FlatLogprobs)
    assert isinstance(prompt, FlatLogprobs)
    assert [*new] == plain.outputs[0].logprobs
    assert [*prompt] == [entry or {} for entry in plain.prompt_logprobs or ()]
    assert [*new[2:5]] == (plain.outputs[0].logprobs or [])[2:5]
    assert new[-1] == new[len(new) - 1]
    assert not FlatLogprobs()[3:]
    with pytest.raises(IndexError):
        new[len(new)]
    assert len([each for each in vars(new).values() if gc.is_tracked(each)]) == 6


def test_without_detokenizing(llm: LLM, server: LiveServer) -> None:
    text = first(llm)
    ids = first(llm, detokenize=False, logprobs=1)
    assert (ids.text, ids.token_ids, ids.finish_reason) == ("", text.token_ids, text.finish_reason)
    assert {entry.decoded_token for position in ids.logprobs or () for entry in position.values()} == {None}
    stops: list[dict[str, Any]] = [{"stop": "a"}, {"stop_regex": "a"}]
    for stop in stops:
        with pytest.raises(InputError, match=f"^{next(iter(stop))} needs detokenize=True, got False"):
            SamplingParams(detokenize=False, **stop)
    answer = server.completion(prompt="Once", max_tokens=3, detokenize=False, return_token_ids=True)["choices"][0]
    assert (answer["text"], len(answer["token_ids"])) == ("", 3)


@pytest.mark.parametrize(
    ("tokens", "params", "end"),
    [
        ([1, 2, 3, 3, 3, 3], (1, 1, 3), 5),
        ([3, 3, 3], (1, 1, 3), 3),
        ([1, 2, 1, 2, 1, 2, 1], (3, 2, 3), 6),
        ([1, 2, 1, 2, 1, 2, 1], (1, 1, 2), None),
        ([4, 4, 4, 4], (3, 2, 2), 4),
        ([1, 2, 3, 1, 2, 3, 1, 2], (3, 1, 3), None),
        ([7, 1, 2, 3, 1, 2, 3], (3, 0, 2), 7),
        ([1, 1, 1, 1], (0, 0, 0), None),
    ],
)
def test_repetition(tokens: list[int], params: tuple[int, int, int], end: int | None) -> None:
    most, least, count = params
    detector = RepetitionDetector(
        RepetitionDetectionParams(max_pattern_size=most, min_pattern_size=least, min_count=count)
    )
    assert next((at for at, token in enumerate(tokens, 1) if detector.add(token)), None) == end


def test_repetition_ends_the_text(llm: LLM, server: LiveServer) -> None:
    fields: dict[str, Any] = {"logit_bias": {300: 100.0}, "logprobs": 0, "max_tokens": 30}
    asked = {"max_pattern_size": 4, "min_count": 5}
    for given in (asked, RepetitionDetectionParams(**asked), SimpleNamespace(**asked, min_pattern_size=0)):
        text = first(llm, **fields, repetition_detection=given)
        assert text.token_ids == [300] * 5
        assert len(text.logprobs or ()) == 5
        assert (text.finish_reason, text.stop_reason) == ("repetition", "repetition_detected")
    assert len(first(llm, **fields, repetition_detection=asked, min_tokens=9).token_ids) == 9
    choice = server.completion(
        prompt="Once", max_tokens=30, temperature=0, logit_bias={"300": 100}, repetition_detection=asked
    )["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    for wrong in ({"max_pattern_size": 2}, {"min_count": 2, "max_pattern_size": 5000}, {"size": 3}, [1]):
        error = error_of(server.post("/v1/completions", prompt="Once", repetition_detection=wrong))
        assert error["param"] == "repetition_detection"


def test_stream_interval(llm: LLM, server: LiveServer) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=12, stream_interval=5)
    counts = [len(output.outputs[0].token_ids) for _, output in llm.stream(PROMPT, params) for _ in [0]]
    assert counts == [1, 6, 11, 12]
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 0, "stream": True, "return_token_ids": True, "n": 2}
    with server.client.stream("POST", "/v1/completions", json={**body, "stream_interval": 5}) as response:
        chunks = [json.loads(data) for data in events(response) if data != "[DONE]"]
    for index in range(2):
        sizes = [len(c["token_ids"]) for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert sum(sizes) == 12
        assert all(size >= 5 for size in sizes[1:-1])
        assert len(sizes) <= 4


def test_the_prefix_cache_is_not_read(llm: LLM, server: LiveServer) -> None:
    def cached(**fields: Any) -> int:
        usage = server.completion(prompt="Once upon a time " * 40, max_tokens=1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached(skip_reading_prefix_cache=True) == 0
    assert cached(skip_reading_prefix_cache=False) > 0


def test_fields_without_effect() -> None:
    for kind in (0, 1, 2, SimpleNamespace(value=1)):
        assert SamplingParams(output_kind=kind).output_kind in (0, 1, 2)
    assert SamplingParams(output_text_buffer_length=7).num_logprobs is None
