"""Logits of the rows of a passage that count, in pieces, so that memory does not grow with the passage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvanta.evaluate.passages import Passage
from kvanta.llm import LLM
from kvanta.params.sampling_params import SamplingParams


def predictions(llm: LLM, passage: Passage) -> Iterator[NDArray[np.float32]]:
    """float32 [rows, vocab] pieces of at most max_num_batched_tokens rows: row `first` and those after it.

    The tokens before a piece come from the prefix cache, which changes no bit of the result. The
    engine must have its prefix cache enabled, or the beginning is computed again for every piece.
    """
    piece = llm.config.max_num_batched_tokens
    llm.reset_prefix_cache()  # of another passage with the same beginning, whose rows would not be computed
    before = passage.first // llm.config.page_size * llm.config.page_size
    if before:  # without logits of rows that do not count
        prompt = {"prompt_token_ids": list(passage.tokens[:before])}
        llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    begin, end = passage.first, passage.first + passage.rows
    while begin < end:
        stop = min(end, (begin // piece + 1) * piece)
        yield llm.logits(passage.tokens[:stop], use_prefix_cache=True)[begin:]
        begin = stop
