"""Prompts of the planned requests: token ids of exactly the planned number, or words of about as many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError
from kvanta.loadgen.workload import PlannedRequest

# Common words, which most tokenizers take for one token each with the space before it.
_TEXT = """
the of and to in is was he for it with as his on be at by had not are but from or have an they which one you were all
her she there would their we him been has when who will no more if out so up said what its about than into them can
only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because long each just state
those people too mr how little good world make very year still see own work men day get here
"""
WORDS = tuple(_TEXT.split())
_OWN, _SHARED = 0, 1


class PromptMaker:
    """Prompts made of `pieces`: token ids, or words. The same (seed, run, request) always gives the same prompt, and
    requests of other runs share nothing with it, so that no run finds the prefixes of an earlier one in a cache.
    """

    def __init__(self, pieces: Sequence[int] | Sequence[str], seed: int = 0) -> None:
        if len(pieces) < 2:
            raise InputError(f"{len(pieces)} different tokens are too few to make prompts of")
        self._pieces = np.asarray(pieces)
        self._seed = seed

    def pieces(self, request: PlannedRequest, run: int = 0) -> list[Any]:
        """Tokens or words, as many as the request's input tokens."""
        indices = []
        missing = request.input_tokens
        for block in request.blocks:
            taken = min(request.block_tokens, missing)
            indices.append(self._draw(run, _SHARED, block, request.block_tokens)[:taken])
            missing -= taken
        indices.append(self._draw(run, _OWN, request.index, missing))
        return list(self._pieces[np.concatenate(indices)].tolist())

    def _draw(self, run: int, kind: int, number: int, count: int) -> NDArray[np.int64]:
        random = np.random.default_rng([self._seed, run, kind, number])
        return random.integers(0, len(self._pieces), size=count)


def words_for(tokens: int, tokens_per_word: float, overhead: float) -> int:
    """Words whose prompt has about `tokens` tokens, `overhead` of them not of words; at least one."""
    return max(1, round((tokens - overhead) / tokens_per_word))
