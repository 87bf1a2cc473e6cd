"""Divergence, agreement and log-probability of each row of logits, compared with a packed reference."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvanta.evaluate.packed_rows import Codes, Floats, unpack

_BLOCK_BYTES = 2**20  # of one float32 buffer; a block needs four, and they should stay in the cache of a core
_pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "figures")


@dataclass(frozen=True)
class ReferenceRows:
    """Stored part of the reference: per row the packed log-probabilities, the most likely token, the true one's."""

    codes: Codes
    """[rows, vocab]"""
    scales: Floats
    """[rows]"""
    top: NDArray[np.int32]
    """[rows]"""
    target: Floats
    """[rows], nats."""

    def __getitem__(self, rows: slice) -> ReferenceRows:
        """Some of the rows."""
        return ReferenceRows(self.codes[rows], self.scales[rows], self.top[rows], self.target[rows])

    def __len__(self) -> int:
        return len(self.scales)


@dataclass(frozen=True)
class RowMetrics:
    """Arrays of one entry per row."""

    kl: NDArray[np.float64]
    """KL(reference || format), nats."""
    same_top: NDArray[np.bool_]
    """True where both have the same most likely token."""
    target: NDArray[np.float64]
    """Log-probability of the token that stands there, nats."""

    @staticmethod
    def join(parts: Sequence[RowMetrics]) -> RowMetrics:
        """One after the other."""
        return RowMetrics(
            np.concatenate([part.kl for part in parts]),
            np.concatenate([part.same_top for part in parts]),
            np.concatenate([part.target for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.kl)


def _blocks(rows: int, vocab: int) -> list[slice]:
    size = max(1, _BLOCK_BYTES // (4 * vocab))
    return [slice(begin, begin + size) for begin in range(0, rows, size)]


def _normalizer(shifted: Floats) -> tuple[NDArray[np.float64], Floats]:
    """The logarithm of the sum of exponentials of each row, and those exponentials."""
    exponentials = np.exp(shifted)
    return np.log(exponentials.sum(axis=1).astype(np.float64)), exponentials


def _compare_block(reference: ReferenceRows, targets: NDArray[np.intp], logits: Floats) -> RowMetrics:
    rows = np.arange(len(logits))
    top = logits.argmax(axis=1)
    shifted = logits - logits[rows, top][:, None]
    log_sum, buffer = _normalizer(shifted)
    target = shifted[rows, targets] - log_sum

    # KL = sum p (log p - log q) / sum p - log sum p, with p as it was rounded. In float32 what is added must be small:
    # the float32 part of log q's normalizer goes inside of the sum, its rest outside.
    p_log = unpack(reference.codes, reference.scales)
    p = np.exp(p_log, out=buffer)
    p_sum = p.sum(axis=1).astype(np.float64)
    inside = log_sum.astype(np.float32)
    p_log -= shifted
    p_log += inside[:, None]
    kl = np.einsum("ij,ij->i", p, p_log) / p_sum + (log_sum - inside) - np.log(p_sum)
    return RowMetrics(np.maximum(kl, 0.0), top == reference.top, target)


def compare(reference: ReferenceRows, targets: Sequence[int], logits: Floats) -> RowMetrics:
    """Figures of logits [rows, vocab]; `targets`: the tokens that stand there. Runs on all CPUs, O(1 MiB) each.

    Each row is computed by itself: the figures do not depend on the number of CPUs.
    """
    target_ids = np.asarray(targets, dtype=np.intp)
    blocks = _blocks(*logits.shape)
    return RowMetrics.join(
        list(_pool.map(lambda rows: _compare_block(reference[rows], target_ids[rows], logits[rows]), blocks))
    )


def pack_rows(targets: Sequence[int], logits: Floats) -> ReferenceRows:
    """Packs the reference's logits [rows, vocab]."""
    from kvanta.evaluate.packed_rows import pack

    target_ids = np.asarray(targets, dtype=np.intp)

    def work(rows: slice) -> ReferenceRows:
        block = logits[rows]
        places = np.arange(len(block))
        top = block.argmax(axis=1)
        shifted = block - block[places, top][:, None]
        log_sum, _ = _normalizer(shifted)
        target = (shifted[places, target_ids[rows]] - log_sum).astype(np.float32)
        return ReferenceRows(*pack(block), top.astype(np.int32), target)

    parts = list(_pool.map(work, _blocks(*logits.shape)))
    return ReferenceRows(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.top for part in parts]),
        np.concatenate([part.target for part in parts]),
    )
