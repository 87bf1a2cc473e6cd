"""Statistics of the keys and values that a model makes of a text, for calibration."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.params.arrays import float_array
from kvanta.params.checks import each_of, truth, whole_number
from kvanta.text.prompts import token_list


class CacheReader:
    """Reads texts through exact pages that are not kept. `lock`: held while the engine computes."""

    def __init__(self, engine: _core.Engine, lock: contextlib.AbstractContextManager[Any] | None = None) -> None:
        self._engine = engine
        self._lock = lock or contextlib.nullcontext()

    @property
    def config(self) -> _core.EngineConfig:
        """The engine's configuration, with every "auto" resolved."""
        return self._engine.config

    @property
    def model_info(self) -> _core.ModelInfo:
        """Sizes of the model."""
        return self._engine.info

    def kv_statistics(
        self, token_ids: Sequence[int] | NDArray[Any], key_means: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        """See LLM.kv_statistics."""
        tokens = np.asarray(token_list(token_ids, self.model_info.vocab), dtype=np.int32)
        heads = self.model_info.layer_heads
        shape = (len(heads), max(count for count, _ in heads), max(channels for _, channels in heads))
        means = None if key_means is None else float_array("key_means", key_means, shape)
        with self._lock:
            return self._engine.statistics(tokens, means)

    def query_moments(
        self, token_ids: Sequence[int] | NDArray[Any], weighted: bool = True, context_lengths: Sequence[int] = ()
    ) -> dict[str, Any]:
        """See LLM.query_moments."""
        tokens = np.asarray(token_list(token_ids, self.model_info.vocab), dtype=np.int32)
        weights = truth("weighted", weighted)
        lengths = each_of("context_lengths", context_lengths, "whole numbers")
        contexts = [whole_number("an entry of context_lengths", length, 0, 2**63 - 1) for length in lengths]
        with self._lock:
            return self._engine.query_moments(tokens, weights, contexts)
