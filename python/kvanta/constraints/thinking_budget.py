"""Ends a text's reasoning after a number of tokens: `thinking_token_budget` of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvanta.constraints.token_mask import Matcher
from kvanta.errors import InputError
from kvanta.text.tokenizer import Tokenizer

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))


class ThinkingState(Protocol):
    """Tells the reasoning of a text that grows."""

    @property
    def in_reasoning(self) -> bool:
        """True where the next token is reasoning."""

    def take(self, text: str) -> object:
        """Appends text."""


@dataclass
class Thinking:
    """The reasoning of one text."""

    state: ThinkingState
    end: Sequence[int]
    """Tokens that end it."""
    marks: Collection[int] = ()
    """Tokens that are not counted."""
    used: int = 0
    """Tokens of reasoning in the prompt."""


class _MarkedThinking:
    """Reasoning between two tokens."""

    def __init__(self, start: str, end: str, *, inside: bool) -> None:
        self.in_reasoning = inside
        self._start, self._end = start, end

    def take(self, text: str) -> None:
        """One token."""
        if text in (self._start, self._end):
            self.in_reasoning = text == self._start


def thinking_marks(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """The texts of two tokens between which a model's reasoning stands, if its vocabulary has them."""
    return next((marks for marks in _MARKS if all(tokenizer.token_id(mark) is not None for mark in marks)), None)


def thinking_of_vocabulary(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thinking:
    """Marks of reasoning that are tokens of the vocabulary. Raises InputError if it has none."""
    marks = thinking_marks(tokenizer)
    if marks is None:
        known = " or ".join(f"{start} and {end}" for start, end in _MARKS)
        message = f"thinking_token_budget needs --reasoning-parser, or {known} in the vocabulary"
        raise InputError(message, "thinking_token_budget")
    start, end = [token for mark in marks if (token := tokenizer.token_id(mark)) is not None]
    last = next((index for index in reversed(range(len(prompt))) if prompt[index] in (start, end)), -1)
    inside = last >= 0 and prompt[last] == start
    used = len(prompt) - 1 - last if inside else 0
    return Thinking(_MarkedThinking(*marks, inside=inside), [end], {start, end}, used)


class ThinkingBudget:
    """Mask for one text: anything that `inner` allows, until the budget is used up; then the end of the reasoning."""

    def __init__(self, budget: int, thinking: Thinking, tokenizer: Tokenizer, vocab: int, inner: Matcher) -> None:
        """Raises InputError where the reasoning ends with tokens that the model does not have."""
        if (last := max(thinking.end, default=0)) >= vocab:
            message = f"thinking_token_budget needs token {last}; the model's ids are 0 to {vocab - 1}"
            raise InputError(message, "thinking_token_budget")
        self._left = budget - thinking.used
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._words = (vocab + 31) // 32
        self._inner = inner
        self._forced: list[int] = []
        self._force()

    def consume_tokens(self, tokens: list[int]) -> bool:
        """Same as Matcher's."""
        state = self._thinking.state
        for token in tokens:
            before = state.in_reasoning
            state.take(self._tokenizer.token_text(token))
            if self._forced:
                del self._forced[0]
            elif before and state.in_reasoning and token not in self._thinking.marks:
                self._left -= 1
            self._force()
        return self._inner.consume_tokens(tokens)

    def _force(self) -> None:
        if not self._forced and self._left <= 0 and self._thinking.state.in_reasoning:
            self._forced = list(self._thinking.end)

    def compute_bitmask(self) -> bytes:
        """Same as Matcher's."""
        if not self._forced:
            return self._inner.compute_bitmask()
        mask = np.zeros(self._words, dtype=np.uint32)
        mask[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
        return mask.tobytes()

    def is_error(self) -> bool:
        """Same as Matcher's."""
        return self._inner.is_error()

    def get_error(self) -> str:
        """Same as Matcher's."""
        return self._inner.get_error()
