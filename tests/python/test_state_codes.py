"""Codes of recurrent states on a trained hybrid: what a rounding costs, and that errors do not add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvanta import LLM
from kvanta.evaluate.divergence import kl_divergence
from kvanta.evaluate.passages import SHIPPED_TEXT

MODEL = Path(__file__).resolve().parents[2] / "models" / "novels3m"
GRID, ROUNDINGS = 64, 16
LIMITS = {"bfloat16": 1e-4, "int8": 1e-3, "int4": 0.1}  # mean KL, in nats a token


@pytest.mark.parametrize("code", LIMITS)
def test_errors_of_roundings_do_not_add_up(code: str) -> None:
    length = GRID * (ROUNDINGS + 1)
    options: dict[str, Any] = {"max_model_len": length, "block_size": GRID, "kv_cache_dtype": "bf16"}
    plain = LLM(MODEL, **options)
    tokens = plain.tokenizer.encode(SHIPPED_TEXT.read_text(encoding="utf-8")[:20000])[:length]
    rounded = LLM(MODEL, state_cache_dtype=code, state_grid=GRID, **options)
    exact, found = plain.logits(tokens), rounded.logits(tokens)
    np.testing.assert_array_equal(found[:GRID], exact[:GRID])
    kl = kl_divergence(exact, found)[GRID:]
    assert 0 < kl.mean() < LIMITS[code]
    first, second = np.split(kl, 2)
    assert second.mean() < 2 * first.mean()
    assert np.exp(-np.mean(log_likelihood(exact, tokens))) < 60, "the model has learned something"


def log_likelihood(logits: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float64]:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = rows[np.arange(len(rows)), tokens[1:]] - np.log(np.exp(rows).sum(axis=1))
    return result
