"""Passages of tokens on which caches are compared, and the rows that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvanta.errors import InputError, reason_of
from kvanta.text.tokenizer import Tokenizer

SHIPPED_TEXT = Path(__file__).parents[1] / "texts" / "treasure_island.txt"
_MIN_TOKENS = 16
_CHARACTERS_PER_TOKEN = 8  # more than texts have on average


@dataclass(frozen=True)
class Passage:
    """Tokens that are read in one go; rows `first` .. len(tokens) - 2 of their logits are evaluated.

    Row i predicts token i + 1, so every evaluated row has a token to be compared with.
    """

    tokens: tuple[int, ...]
    first: int

    @property
    def rows(self) -> int:
        """Number of rows of logits that count."""
        return len(self.tokens) - 1 - self.first

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that those rows should predict."""
        return self.tokens[self.first + 1 :]


def read_text(file: str | Path | None) -> str:
    """The text of `file`, or the shipped one. Raises InputError."""
    try:
        return Path(SHIPPED_TEXT if file is None else file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"the text {str(file)!r} cannot be read: {reason_of(error)}") from None


def tokenize(text: str, tokenizer: Tokenizer, most: int) -> list[int]:
    """The text's first `most` tokens, without special ones; of a long text no more is read than that takes."""
    characters = _CHARACTERS_PER_TOKEN * most
    tokens = tokenizer.encode(text[:characters], add_special_tokens=False)
    if len(tokens) <= most and len(text) > characters:  # tokens of many characters, or the cut is within the last one
        tokens = tokenizer.encode(text, add_special_tokens=False)
    return tokens[:most]


def beginning_of(tokenizer: Tokenizer) -> list[int]:
    """The model's beginning-of-sequence token as a prefix of each passage, or nothing."""
    with_it, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return with_it[: len(with_it) - len(plain)] if with_it[-len(plain) :] == plain else []


def windows(tokens: Sequence[int], beginning: Sequence[int], context: int) -> list[Passage]:
    """Windows of `context` tokens, each read after `beginning`; the second half of each is evaluated.

    A rest that fills no window is left out; a text shorter than one window is one window. Raises InputError.
    """
    step = context - len(beginning)
    if len(tokens) < _MIN_TOKENS or context < _MIN_TOKENS:
        raise InputError(
            f"the text has {len(tokens)} tokens and the context is {context}; at least {_MIN_TOKENS} are needed"
        )
    starts = range(0, len(tokens) - step + 1, step) or range(1)
    parts = [(*beginning, *tokens[start : start + step]) for start in starts]
    return [Passage(part, len(part) // 2 - 1) for part in parts]
