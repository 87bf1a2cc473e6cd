"""Masks of `allowed_token_ids` and `bad_words`, for one text: the engine requests them like a grammar's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.text.tokenizer import Tokenizer


class Matcher(Protocol):
    """The state of a grammar: llguidance's LLMatcher, or one that wraps it."""

    def consume_tokens(self, tokens: list[int]) -> bool:
        """Takes the next tokens of the text."""

    def compute_bitmask(self) -> bytes:
        """Bits of the tokens that may follow."""

    def is_error(self) -> bool:
        """True once the state can no longer be used."""

    def get_error(self) -> str:
        """The reason."""


def bad_word_tokens(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of words, as vLLM has them: at the beginning of a text, and after a space."""
    sequences: list[list[int]] = []
    for word in words:
        first = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not first:
            raise InputError(f"bad_words has {one_line(word)}, which has no tokens", "bad_words")
        sequences.append(first)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if spaced and spaced[0] != first[0] and len(spaced) == len(first):
            sequences.append(spaced)
    return sequences


class TokenMask:
    """Allows some tokens alone, and none that would complete a bad word; with `inner`, only what that allows, too."""

    def __init__(
        self,
        vocab: int,
        *,
        allowed: Sequence[int] | None = None,
        banned: Collection[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        inner: Matcher | None = None,
    ) -> None:
        """`banned`: tokens that are never allowed. Raises InputError for allowed tokens beyond the vocabulary.

        Bad words with such tokens, which a tokenizer with more of them than the model may give, cannot be written.
        """
        bits = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
        if allowed is None:
            bits[:vocab] = 1
        else:
            largest = max(allowed, default=0)
            if largest >= vocab:
                message = f"allowed_token_ids has {largest}; the model's ids are 0 to {vocab - 1}"
                raise InputError(message, "allowed_token_ids")
            bits[list(allowed)] = 1
        bits[[token for token in banned if token < vocab]] = 0
        self._ends: dict[int, list[tuple[list[int], int]]] = {}  # by the last but one token of a bad word
        self._longest = 0
        for word in bad_words:
            if max(word) >= vocab:
                continue
            *before, last = word
            if before:
                self._ends.setdefault(before[-1], []).append((before, last))
                self._longest = max(self._longest, len(before))
            else:
                bits[last] = 0
        self._base = np.packbits(bits, bitorder="little").view(np.uint32)
        self._inner = inner
        self._tail: list[int] = []

    def consume_tokens(self, tokens: list[int]) -> bool:
        """Same as Matcher's."""
        self._tail = [*self._tail, *tokens][-self._longest :] if self._longest else []
        return self._inner is None or self._inner.consume_tokens(tokens)

    def compute_bitmask(self) -> bytes:
        """Same as Matcher's."""
        mask = self._base.copy()
        for before, last in self._ends.get(self._tail[-1], ()) if self._tail else ():
            if self._tail[-len(before) :] == before:
                mask[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
        if self._inner is not None:
            other: NDArray[np.uint32] = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint32)
            mask &= other[: len(mask)]
        return mask.tobytes()

    def is_error(self) -> bool:
        """Same as Matcher's."""
        return self._inner is not None and self._inner.is_error()

    def get_error(self) -> str:
        """Same as Matcher's."""
        return "" if self._inner is None else self._inner.get_error()
