"""allowed_token_ids and bad_words: what is sampled, alone and within a form."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest
from live_server import error_of, live_server
from stories import GREEDY, PROMPT

from kvanta import LLM, InputError, SamplingParams, StructuredOutputsParams
from kvanta.constraints.reasoning_gate import GatedMatcher, ReasoningGate
from kvanta.constraints.token_mask import TokenMask, bad_word_tokens


def allowed(mask: TokenMask, vocab: int) -> set[int]:
    bits = np.unpackbits(np.frombuffer(mask.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist()) & set(range(vocab))


def test_bad_words_end_where_their_beginning_stands() -> None:
    mask = TokenMask(40, bad_words=[[7], [1, 2, 3], [2, 4]], banned=[39])
    every = set(range(40)) - {7, 39}
    assert allowed(mask, 40) == every
    mask.consume_tokens([1, 2])
    assert allowed(mask, 40) == every - {3, 4}
    mask.consume_tokens([2])
    assert allowed(mask, 40) == every - {4}
    mask.consume_tokens([5])
    assert allowed(mask, 40) == every


@pytest.mark.parametrize("vocab", [40, 64])
def test_bad_words_beyond_the_vocabulary_ban_nothing(vocab: int) -> None:
    """A tokenizer may have more tokens than its model; vocabularies of whole 32 have no bits to spare for them."""
    mask = TokenMask(vocab, bad_words=[[vocab], [2**20], [1, vocab], [vocab, 2], [1, 3]])
    assert allowed(mask, vocab) == set(range(vocab))
    mask.consume_tokens([1])
    assert allowed(mask, vocab) == set(range(vocab)) - {3}


def test_reasoning_that_the_model_cannot_begin() -> None:
    """Its first token is one of the tokenizer's alone."""
    state: Any = types.SimpleNamespace(in_content=True)
    inner: Any = TokenMask(64, allowed=[1])
    for token, expected in ((2, {1, 2}), (64, {1}), (70, {1})):
        gate = ReasoningGate(state, str, may_begin=token)
        mask: Any = GatedMatcher(inner, gate, 64, [])
        assert allowed(mask, 64) == expected


def test_masks_meet() -> None:
    inner = TokenMask(40, allowed=[1, 2, 3, 38])
    assert allowed(TokenMask(40, allowed=[2, 3, 4, 38], banned=[38], inner=inner), 40) == {2, 3}


def test_only_allowed_tokens_are_sampled(llm: LLM, story: list[int]) -> None:
    ids = sorted(set(story[:6]))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24, allowed_token_ids=ids, n=2)
    (output,) = llm.generate(PROMPT, params)
    for text in output.outputs:
        assert len(text.token_ids) == 24
        assert set(text.token_ids) <= set(ids)
    every = dataclasses.replace(GREEDY, allowed_token_ids=list(range(llm.model_info.vocab)))
    assert llm.generate(PROMPT, every)[0].outputs[0].token_ids == story


@pytest.mark.parametrize("flat", [False, True])
def test_log_probabilities_of_a_prompt_that_no_token_may_follow(llm: LLM, flat: bool) -> None:
    """They come with the end of the text, which has no token to come with."""
    token = llm.generate("Once", GREEDY)[0].outputs[0].token_ids[0]  # "upon"
    params = SamplingParams(
        max_tokens=4,
        prompt_logprobs=1,
        flat_logprobs=flat,
        allowed_token_ids=[token],
        bad_words=[llm.tokenizer.decode([token]).strip()],
        ignore_eos=True,
    )
    (output,) = llm.generate(PROMPT, params)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "stop")
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=1, flat_logprobs=flat))[0]
    assert output.prompt_logprobs is not None
    assert list(output.prompt_logprobs) == list(expected.prompt_logprobs or [])


def test_bad_words_are_not_written(llm: LLM) -> None:
    text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    for word in text.split()[:4]:
        params = dataclasses.replace(GREEDY, bad_words=[word])
        tokens = llm.generate(PROMPT, params)[0].outputs[0].token_ids
        for sequence in bad_word_tokens([word], llm.tokenizer):
            length = len(sequence)
            assert sequence not in [tokens[at : at + length] for at in range(len(tokens))]
    unrelated = dataclasses.replace(GREEDY, bad_words=["zzzzq"])
    assert llm.generate(PROMPT, unrelated)[0].outputs[0].text == text
    assert llm.generate(PROMPT, dataclasses.replace(GREEDY, bad_words=[]))[0].outputs[0].text == text


def test_the_end_token(llm: LLM) -> None:
    (end,) = llm.model_info.eos_token_ids[:1]
    (ended,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, allowed_token_ids=[end]))
    assert ended.outputs[0].token_ids == [end]
    assert ended.outputs[0].finish_reason == "stop"
    ids = [end, 300]
    (endless,) = llm.generate(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True, allowed_token_ids=ids))
    assert endless.outputs[0].token_ids == [300] * 5


def test_within_a_form(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputsParams(choice=["cat", "dog"])
    (plain,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, structured_outputs=form))
    word = plain.outputs[0].text
    first = plain.outputs[0].token_ids[0]
    others = [token for token in range(llm.model_info.vocab) if token != first]
    (other,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, structured_outputs=form, allowed_token_ids=others))
    assert other.outputs[0].token_ids[0] != first
    assert other.outputs[0].text in {"cat", "dog"}
    assert word in {"cat", "dog"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids must be a list"),
        ({"allowed_token_ids": [2**20]}, "the model's ids are 0 to 511"),
        ({"allowed_token_ids": [True]}, "a token of allowed_token_ids"),
        ({"allowed_token_ids": [1] * 20_000}, "at most 16384"),
        ({"bad_words": [""]}, "bad_words must be"),
        ({"bad_words": ["a"] * 65}, "at most 64"),
        ({"bad_words": ["  "]}, "has no tokens"),
    ],
)
def test_errors(llm: LLM, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(PROMPT, SamplingParams(**wrong))  # type: ignore[arg-type]


def test_requests(llm: LLM, story: list[int]) -> None:
    with live_server() as server:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        ids = sorted(set(story[:6]))
        requests: list[dict[str, Any]] = [
            {"allowed_token_ids": ids},
            {"bad_words": ["there", "was"]},
            {"bad_words": []},
        ]
        for more in requests:
            expected = llm.generate(PROMPT, dataclasses.replace(GREEDY, **more))[0].outputs[0]
            assert server.completion(**body, **more)["choices"][0]["token_ids"] == expected.token_ids
        for wrong in ({"allowed_token_ids": [512]}, {"allowed_token_ids": "a"}, {"bad_words": [3]}):
            response = server.post("/v1/completions", **body, **wrong)
            assert response.status_code == 400
            assert error_of(response)["param"] == next(iter(wrong))
        assert server.on_loop(lambda: server.front.admitted) == 0
