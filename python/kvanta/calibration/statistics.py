"""Statistics of a text's keys and values, summed over windows of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.terminal.progress import progress_bar


@dataclass
class KvStatistics:
    """Axis 1 is the side: 0 for K after RoPE, 1 for V. See KvStatistics in include/kvanta/engine.h."""

    tokens: int
    edges: NDArray[np.float32]
    """[bins + 1]: of magnitudes."""
    histogram: NDArray[np.int64]
    """[layers, 2, kv_heads, bins]"""
    amax: NDArray[np.float32]
    """[layers, 2, kv_heads, head_dim], as the sums."""
    sum: NDArray[np.float64]
    square_sum: NDArray[np.float64]

    def add(self, other: KvStatistics) -> None:
        """Adds the figures of another text of the same model."""
        self.tokens += other.tokens
        self.histogram += other.histogram
        self.amax = np.maximum(self.amax, other.amax)
        self.sum += other.sum
        self.square_sum += other.square_sum

    def means(self) -> NDArray[np.float64]:
        """[layers, 2, kv_heads, head_dim]"""
        return self.sum / self.tokens

    def deviations(self) -> NDArray[np.float64]:
        """Standard deviations, [layers, 2, kv_heads, head_dim]."""
        variance: NDArray[np.float64] = self.square_sum / self.tokens - self.means() ** 2
        return np.sqrt(np.maximum(variance, 0))

    def mean_shares(self) -> NDArray[np.float64]:
        """[layers, 2, kv_heads]: 0 to 1, the part of a head's squared size that is its means'."""
        squares: NDArray[np.float64] = (self.square_sum / self.tokens).sum(axis=-1)
        shares: NDArray[np.float64] = (self.means() ** 2).sum(axis=-1) / np.maximum(squares, np.finfo(np.float64).tiny)
        return shares


class KvReader(Protocol):
    """Reads texts through a model on exact pages: an LLM, or an engine's CacheReader."""

    @property
    def config(self) -> _core.EngineConfig:
        """The engine's configuration."""

    @property
    def model_info(self) -> _core.ModelInfo:
        """Sizes of the model."""

    def kv_statistics(
        self, token_ids: Sequence[int] | NDArray[Any], key_means: NDArray[np.float32] | None = None
    ) -> dict[str, Any]:
        """Fields of KvStatistics."""

    def query_moments(
        self, token_ids: Sequence[int] | NDArray[Any], weighted: bool = True, context_lengths: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Fields of QueryMoments."""


def collect_statistics(
    llm: KvReader,
    token_ids: Sequence[int],
    window: int,
    key_means: NDArray[np.float32] | None = None,
    what: str = "reading",
) -> KvStatistics:
    """Forwards the text in windows of `window` tokens, each a separate sequence.

    `key_means`: [layers, kv_heads, head_dim], subtracted from K before anything is counted.
    """
    total: KvStatistics | None = None
    with progress_bar(len(token_ids), what, "token") as bar:
        for begin in range(0, len(token_ids), window):
            part = KvStatistics(**llm.kv_statistics(token_ids[begin : begin + window], key_means))
            bar.update(part.tokens)
            if total is None:
                total = part
            else:
                total.add(part)
    if total is None:
        raise AssertionError("no tokens")
    return total
