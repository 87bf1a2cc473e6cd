"""Merges of byte-pair vocabularies whose files list tokens alone: all pairs of tokens that make a token, in order."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from kvanta.errors import InputError

_MAX_TOKEN_BYTES = 4096  # far above every vocabulary; splitting a token at every place takes the square of it


def check_token_sizes(path: Path, tokens: Iterable[str | bytes]) -> None:
    """Raises InputError, with the name of their file, if one is too long for its pairs to be found."""
    for index, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN_BYTES // 4:
            size = len(token.encode() if isinstance(token, str) else token)
            if size > _MAX_TOKEN_BYTES:
                raise InputError(f"{path}: token {index} has {size} bytes; at most {_MAX_TOKEN_BYTES} are read")


def merges_by_rank(tokens: Iterable[str], ranks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The order of `tokens`, which are those of `ranks` or a part of them: a list of ranks has no pairs."""
    for token in tokens:
        yield from sorted(_pairs(token, ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """SentencePiece's order, for pieces in the order of their ids.

    Of equal scores SentencePiece takes the leftmost pair, so that what it has merged grows on: longer left parts first.
    """
    found = [
        (-score, -len(pair[0]), -len(pair[1]), pair)
        for piece, score in scores.items()
        for pair in _pairs(piece, scores)
    ]
    found.sort(key=lambda merge: merge[:3])
    return [pair for _, _, _, pair in found]


def _pairs(token: str, tokens: Container[str]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(token)):
        if token[:cut] in tokens and token[cut:] in tokens:
            yield token[:cut], token[cut:]
