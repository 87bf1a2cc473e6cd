"""Kullback-Leibler divergence per token of the predictions of one cache format from another's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROWS = 64  # at a time, in double precision: 64 rows of 150,000 tokens are 77 MB


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Over the last axis, in double precision."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_divergence(reference: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(reference || other) in nats, per row of logits [tokens, vocab]."""
    if reference.shape != other.shape:
        raise ValueError(f"logits of different shapes: {reference.shape} and {other.shape}")
    rows = []
    for begin in range(0, len(reference), _ROWS):
        p = log_softmax(reference[begin : begin + _ROWS])
        q = log_softmax(other[begin : begin + _ROWS])
        rows.append((np.exp(p) * (p - q)).sum(axis=-1))
    return np.concatenate(rows) if rows else np.empty(0)
