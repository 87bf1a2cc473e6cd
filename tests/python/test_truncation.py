"""truncate_prompt_tokens: prompts are cut where the request says, in LLM and in requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server
from stories import GREEDY

from kvanta import LLM, InputError, SamplingParams

LONG = "Lily had a cat. " * 400


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_llm_cuts_one_side(llm: LLM, side: str | None) -> None:
    ids = llm.tokenizer.encode(LONG)
    params = dataclasses.replace(GREEDY, truncate_prompt_tokens=7, truncation_side=side)
    (output,) = llm.generate(LONG, params)
    assert output.prompt_token_ids == (ids[:7] if side == "right" else ids[-7:])
    (whole,) = llm.generate("Once", params)
    assert whole.prompt_token_ids == llm.tokenizer.encode("Once")
    expected = llm.generate({"prompt_token_ids": output.prompt_token_ids}, GREEDY)[0].outputs[0].token_ids
    assert output.outputs[0].token_ids == expected


def test_all_that_the_context_holds(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, truncate_prompt_tokens=-1, ignore_eos=True)
    (output,) = llm.generate(LONG, params)
    assert len(output.prompt_token_ids) == llm.config.max_model_len - 24
    assert len(output.outputs[0].token_ids) == 24


def test_requests(server: LiveServer) -> None:
    tokenizer, limit = server.front.tokenizer, server.front.max_model_len
    ids = tokenizer.encode(LONG)
    body: dict[str, Any] = {"prompt": LONG, "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    assert server.post("/v1/completions", **body).status_code == 400  # too long without truncation
    cut = server.completion(**body, truncate_prompt_tokens=9, echo=True)["choices"][0]
    assert cut["prompt_token_ids"] == ids[-9:]
    assert cut["text"].startswith(tokenizer.decode(ids[-9:]))
    filled = server.completion(**body, truncate_prompt_tokens=-1, truncation_side="right")["choices"][0]
    assert filled["prompt_token_ids"] == ids[: limit - 3]
    by_ids = server.completion(**{**body, "prompt": ids}, truncate_prompt_tokens=9)["choices"][0]
    assert by_ids["token_ids"] == cut["token_ids"]
    messages = [{"role": "user", "content": LONG}]
    chat = server.post("/v1/chat/completions", messages=messages, max_tokens=3, truncate_prompt_tokens=20)
    assert chat.json()["usage"]["prompt_tokens"] == 20
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": limit}, {"truncation_side": "middle"}):
        response = server.post("/v1/completions", **body, **wrong)
        assert response.status_code == 400
        error_of(response)


@pytest.mark.parametrize("wrong", [{"truncate_prompt_tokens": -2}, {"truncation_side": 1}])
def test_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        SamplingParams(**wrong)
