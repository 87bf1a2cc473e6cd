"""Memory that a model of several takes, and how long it stays there."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvanta import InputError
from kvanta.server.models.keep_alive import read_keep_alive
from kvanta.server.models.memory import model_memory

MODEL = "stories260k"
WEIGHTS = 1040128


@pytest.mark.parametrize(
    ("given", "seconds"), [(0, 0), ("0", 0), (5, 5), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("-1m", math.inf)]
)
def test_durations(given: Any, seconds: float) -> None:
    assert read_keep_alive(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "m", "5 m", True, [], "1d", None])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(InputError, match="keep_alive must be seconds or a duration"):
        read_keep_alive(given)


def test_memory_is_weights_and_cache() -> None:
    budget = 1 << 30
    sequence = 655360  # 512 tokens of 1,280 bytes
    assert model_memory(MODEL, {}, None, budget) == (WEIGHTS + 64 * sequence, 64 * sequence)
    assert model_memory(MODEL, {"max_num_seqs": "2", "max_model_len": 256}, None, budget).cache == sequence
    assert model_memory(MODEL, {}, None, 10 * sequence).cache == 4 * sequence
    assert model_memory(MODEL, {"kv_cache_memory_bytes": "8MiB"}, None, budget) == (WEIGHTS + (8 << 20), None)
    assert model_memory(MODEL, {"max_total_tokens": 100}, None, budget) == (WEIGHTS + 2 * 64 * 1280, None)
    assert model_memory(MODEL, {}, 4 << 20, budget) == (4 << 20, (4 << 20) - WEIGHTS)
    assert model_memory("/nowhere", {"kv_cache_memory_bytes": 1}, 4 << 20, budget) == (4 << 20, None)
    with pytest.raises(InputError, match="its weights alone have"):
        model_memory(MODEL, {}, 1 << 20 >> 1, budget)
    with pytest.raises(InputError, match="give memory and kv_cache_memory_bytes"):
        model_memory(MODEL, {"tensor_parallel_size": 2}, None, budget)
