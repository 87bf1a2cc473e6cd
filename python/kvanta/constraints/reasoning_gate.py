"""A grammar that begins where a text's reasoning ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher


class ReasoningState(Protocol):
    """Tells reasoning from the answer in a text that grows."""

    @property
    def in_content(self) -> bool:
        """True where the answer may stand."""

    def take(self, text: str) -> object:
        """Appends text."""


class ReasoningGate:
    """The state of one text. The token that ends the reasoning is the last one that the grammar does not see."""

    def __init__(
        self,
        state: ReasoningState,
        text_of: Callable[[int], str],
        *,
        may_begin: int | None = None,
        may_end: bool = False,
    ) -> None:
        """`may_begin`: token with which a text that is content so far may turn to reasoning, as its first one.
        `may_end`: the text may end without an answer.
        """
        self._state = state
        self._text_of = text_of
        self._first = True
        self.may_begin = may_begin
        self.may_end = may_end

    @property
    def open(self) -> bool:
        """True where the next token is the grammar's."""
        return self._state.in_content

    def pass_on(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that are the grammar's, out of the next ones of the text."""
        passed = []
        for token in tokens:
            if self.open and not (self._first and token == self.may_begin):
                passed.append(token)
            else:
                self._state.take(self._text_of(token))
            self._first = False
        return passed

    @property
    def may_begin_now(self) -> int | None:
        """`may_begin` while it is allowed."""
        return self.may_begin if self._first else None


class GatedMatcher:
    """A matcher for one text that starts once a gate opens. Until then, any token but the end of the text may come."""

    def __init__(self, matcher: LLMatcher, gate: ReasoningGate, vocab: int, end_tokens: Sequence[int]) -> None:
        self._matcher = matcher
        self._gate = gate
        self._vocab = vocab
        any_token = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
        any_token[:vocab] = 1
        if not gate.may_end:
            any_token[[token for token in end_tokens if 0 <= token < vocab]] = 0
        self._any_token = np.packbits(any_token, bitorder="little").view(np.uint32)

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        """Same as LLMatcher's."""
        return bool(self._matcher.consume_tokens(self._gate.pass_on(tokens)))

    def compute_bitmask(self) -> bytes:
        """Same as LLMatcher's."""
        if not self._gate.open:
            return self._any_token.tobytes()
        mask: NDArray[np.uint32] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        token = self._gate.may_begin_now
        if token is None or token >= self._vocab:
            return mask.tobytes()
        mask = mask.copy()
        mask[token // 32] |= np.uint32(1 << token % 32)
        return mask.tobytes()

    def is_error(self) -> bool:
        """Same as LLMatcher's."""
        return bool(self._matcher.is_error())

    def get_error(self) -> str:
        """Same as LLMatcher's."""
        return str(self._matcher.get_error())
