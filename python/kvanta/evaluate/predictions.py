"""Logits of the rows of a passage that count, in pieces, so that memory does not grow with the passage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.evaluate.passages import Passage
from kvanta.llm import LLM
from kvanta.params.sampling_params import SamplingParams


def predictions(llm: LLM, passage: Passage, demoted: float = 0.0) -> Iterator[NDArray[np.float32]]:
    """float32 [rows, vocab] pieces of at most max_num_batched_tokens rows: row `first` and those after it.

    The tokens before a piece come from the prefix cache, which changes no bit of the result. The
    engine must have its prefix cache enabled, or the beginning is computed again for every piece.
    `demoted`: share of the pages before row `first`, the oldest ones, that it and those after it read
    from the floor of the engine's cache; the logits are then one piece.
    """
    if demoted > 0:
        yield llm.logits(passage.tokens[:-1], kv_cache_events=_demotion(llm, passage, demoted))[passage.first :]
        return
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


def _demotion(llm: LLM, passage: Passage, demoted: float) -> list[dict[str, Any]]:
    pages = round(demoted * (passage.first // llm.config.page_size))
    level = max(len(group["level_page_bytes"]) for group in llm.stats()["groups"])
    return [{"position": passage.first, "pages": [0, pages], "level": level}] if pages else []
