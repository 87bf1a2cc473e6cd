"""thinking_token_budget: after this many tokens of reasoning, its end is written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer, error_of, live_server
from stories import PROMPT

from kvanta import LLM, InputError, SamplingParams
from kvanta.constraints.thinking_budget import Thinking, ThinkingBudget, thinking_of_vocabulary
from kvanta.constraints.token_mask import TokenMask
from kvanta.parsers.harmony import FINAL, MARKS, HarmonyReader

WORDS = ["a", "b", "<think>", "</think>", *MARKS, "assistant", "analysis", "final"]
CHAT = [{"role": "user", "content": "Where is Lily?"}]


class Words:
    """A vocabulary of whole words."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def token_id(self, text: str) -> int | None:
        return self._words.index(text) if text in self._words else None

    def token_text(self, token: int) -> str:
        return self._words[token]

    def ids(self, text: str) -> list[int]:
        return [self._words.index(word) for word in text.split()]


WORDS_OF_MODEL: Any = Words(WORDS)


def forced(budget: ThinkingBudget) -> str | None:
    """The only word that may follow; None: any."""
    bits = np.unpackbits(np.frombuffer(budget.compute_bitmask(), dtype=np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits).tolist()
    return WORDS[allowed[0]] if len(allowed) == 1 else None


def budget_of(prompt: str, tokens: int) -> ThinkingBudget:
    thinking = thinking_of_vocabulary(WORDS_OF_MODEL, WORDS_OF_MODEL.ids(prompt))
    return ThinkingBudget(tokens, thinking, WORDS_OF_MODEL, len(WORDS), TokenMask(len(WORDS)))


@pytest.mark.parametrize(
    ("prompt", "budget", "text"),
    [
        ("a <think>", 2, "a b !</think> a b a"),
        ("a <think>", 0, "!</think> a"),
        ("a <think> b", 2, "a !</think> a"),
        ("a <think> b a b", 2, "!</think> a"),
        ("a <think> b </think>", 1, "a a a"),
        ("a", 2, "a b a <think> a b !</think> a b"),
        ("a <think>", 3, "a </think> a b a b"),
    ],
)
def test_the_end_is_forced(prompt: str, budget: int, text: str) -> None:
    mask = budget_of(prompt, budget)
    for word in text.split():
        assert forced(mask) == (word[1:] if word.startswith("!") else None), word
        mask.consume_tokens(WORDS_OF_MODEL.ids(word.removeprefix("!")))
    assert forced(mask) is None


def test_channels() -> None:
    reader = HarmonyReader()
    reader.prime("<|start|>assistant")
    end = WORDS_OF_MODEL.ids(FINAL.replace("<", " <").replace(">", "> "))
    mask = ThinkingBudget(1, Thinking(reader, end), WORDS_OF_MODEL, len(WORDS), TokenMask(len(WORDS)))
    mask.consume_tokens(WORDS_OF_MODEL.ids("<|channel|> analysis <|message|>"))
    assert forced(mask) is None
    mask.consume_tokens(WORDS_OF_MODEL.ids("a"))
    for token in end:
        assert forced(mask) == WORDS[token]
        mask.consume_tokens([token])
    assert forced(mask) is None
    assert reader.in_content


def test_an_end_that_the_model_does_not_have() -> None:
    """A tokenizer may have more tokens than its model."""
    thinking = Thinking(HarmonyReader(), [3, 70])
    with pytest.raises(InputError, match=r"^thinking_token_budget needs token 70; the model's ids are 0 to 63"):
        ThinkingBudget(4, thinking, WORDS_OF_MODEL, 64, TokenMask(64))


def test_a_vocabulary_without_marks(llm: LLM) -> None:
    with pytest.raises(InputError, match=r"^thinking_token_budget needs --reasoning-parser, or <think> and </think>"):
        llm.generate(PROMPT, SamplingParams(thinking_token_budget=3))
    assert llm.generate(PROMPT, SamplingParams(thinking_token_budget=-1, max_tokens=1))[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(reasoning_parser="deepseek_r1") as running:
        yield running


@pytest.mark.parametrize("budget", [0, 5])
def test_chats(server: LiveServer, budget: int) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    free = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert free["message"]["content"] is None
    end = server.front.tokenizer.encode("</think>", add_special_tokens=False)
    answer = server.post("/v1/chat/completions", **body, n=2, thinking_token_budget=budget).json()
    for choice in answer["choices"]:
        assert choice["token_ids"][: budget + len(end)] == free["token_ids"][:budget] + end
        assert choice["message"]["content"]
        thought = server.front.tokenizer.decode(free["token_ids"][:budget])
        assert (choice["message"]["reasoning_content"] or "").rstrip() == thought
    form = {"structured_outputs": {"regex": "[0-9]{3}"}}
    formed = server.post("/v1/chat/completions", **body, **form, thinking_token_budget=budget).json()["choices"][0]
    assert formed["message"]["content"].isdigit()


def test_completions_and_generate(server: LiveServer) -> None:
    end = server.front.tokenizer.encode("</think>", add_special_tokens=False)
    body: dict[str, Any] = {"prompt": "Lily <think>", "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    tokens = server.completion(**body, thinking_token_budget=6)["choices"][0]["token_ids"]
    forced_at = [at for at in range(20) if tokens[at : at + len(end)] == end]
    assert forced_at == [6]
    params = {"max_new_tokens": 20, "temperature": 0}
    answer = server.post("/generate", text="Lily <think>", sampling_params=params, max_thinking_tokens=6)
    assert answer.json()["output_ids"] == tokens
    outside = server.completion(**{**body, "prompt": "Lily"}, thinking_token_budget=0)["choices"][0]["token_ids"]
    assert outside == server.completion(**{**body, "prompt": "Lily"})["choices"][0]["token_ids"]
    wrong = error_of(server.post("/v1/completions", **body, thinking_token_budget=-2))
    assert wrong["param"] == "thinking_token_budget"
