"""From figures of single tokens to those of a format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.evaluate.row_metrics import RowMetrics

_SAMPLES = 2000
_MIN_WINDOWS = 4
_BLOCK_TOKENS = 128
_SEED = 20240229


def bootstrap_unit(windows: int) -> str:
    """Unit of bootstrap resampling: whole windows, since their tokens correlate, or blocks if there are few windows."""
    return "windows" if windows >= _MIN_WINDOWS else f"blocks of {_BLOCK_TOKENS} tokens"


def bootstrap_units(parts: Sequence[RowMetrics]) -> list[NDArray[np.float64]]:
    """The KL of each unit's tokens."""
    if len(parts) >= _MIN_WINDOWS:
        return [part.kl for part in parts]
    joined = np.concatenate([part.kl for part in parts])
    return np.array_split(joined, max(1, len(joined) // _BLOCK_TOKENS))


def confidence_interval(units: Sequence[NDArray[np.float64]]) -> list[float]:
    """95 % bootstrap interval of the mean over all tokens, resampled by unit; the same units give the same interval."""
    sums = np.array([unit.sum() for unit in units])
    counts = np.array([len(unit) for unit in units])
    drawn = np.random.default_rng(_SEED).integers(len(units), size=(_SAMPLES, len(units)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    return [float(value) for value in np.quantile(means, [0.025, 0.975])]


def paired_difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, list[float]]:
    """Mean of one - other, and the interval of that mean; both are means over the same bootstrap units, in order.

    Texts differ more than formats do: on the same units a difference shows that two intervals would hide.
    """
    differences = np.asarray(one, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    return float(differences.mean()), confidence_interval(list(differences.reshape(-1, 1)))


def perplexity(log_probabilities: Sequence[float] | NDArray[np.float64]) -> float:
    """Perplexity of log-probabilities in nats."""
    return float(np.exp(-np.mean(np.asarray(log_probabilities, dtype=np.float64))))


def summarize(parts: Sequence[RowMetrics], reference_perplexity: float) -> dict[str, Any]:
    """The report's figures; KL in nats per token, top1 a share. One part per window."""
    rows = RowMetrics.join(parts)
    own = perplexity(rows.target)
    units = bootstrap_units(parts)
    return {
        "kl_mean": float(rows.kl.mean()),
        "kl_mean_ci95": confidence_interval(units),
        "kl_means": [float(unit.mean()) for unit in units],
        "kl_median": float(np.median(rows.kl)),
        "kl_p99": float(np.quantile(rows.kl, 0.99)),
        "kl_max": float(rows.kl.max()),
        "top1": float(rows.same_top.mean()),
        "ppl": own,
        "ppl_ratio": own / reference_perplexity,
    }
