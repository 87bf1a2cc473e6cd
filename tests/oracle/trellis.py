"""The trellis formats t4, t3 and t2 in numpy, written from docs/formats.md and not from the C++.

The levels are data: they are read from the file that tools/train_trellis.py wrote.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy as np
from kv_cells import F32, U8
from numpy.typing import NDArray

I64 = NDArray[np.int64]
LEVELS = Path(__file__).resolve().parents[2] / "src" / "formats" / "trellis_levels.h"
WRONG_START = 16384
JOIN_BITS = 48
REDUCED_STEPS = 8


@cache
def tables() -> dict[int, tuple[int, I64]]:
    """Root mean square at which a row is searched, and the 256 levels, by bits."""
    found = re.findall(r"\{(\d+),\s*// (\d) bits\s*\{([^}]*)\}", LEVELS.read_text())
    return {int(bits): (int(rms), np.array([int(x) for x in text.split(",")])) for rms, bits, text in found}


def _saturate(x: I64) -> I64:
    return np.clip(x, -32768, 32767)


def _run(targets: I64, bits: int, metrics: I64) -> tuple[I64, I64]:
    """Processes targets [rows, n] from the last to the first: metrics [rows, u] after it, decisions [n, rows, u]."""
    rows, count = targets.shape
    levels = tables()[bits][1]
    squares = (levels * levels + 1) >> 1
    decisions = np.empty((count, rows, metrics.shape[1]), np.int64)
    for step, element in enumerate(range(count - 1, -1, -1), start=1):
        q = targets[:, element, None]
        cost = _saturate(np.repeat(metrics, 1 << bits, axis=1) - ((q * levels + 64) >> 7))
        by_choice = _saturate(cost + squares).reshape(rows, 1 << bits, -1)
        decisions[element] = by_choice.argmin(axis=1)  # the first of equals
        metrics = _saturate(by_choice.min(axis=1) + ((q * q + (1 << 14)) >> 15))
        if step % REDUCED_STEPS == 0:
            metrics = _saturate(metrics - metrics.min(axis=1, keepdims=True))
    return metrics, decisions


def _follow(decisions: I64, bits: int, u: I64) -> tuple[I64, I64]:
    """Windows [rows, n] of the path that ends in u, and the u in which it begins."""
    windows = np.empty((len(u), len(decisions)), np.int64)
    for element, decision in enumerate(decisions):
        windows[:, element] = u | decision[np.arange(len(u)), u] << (8 - bits)
        u = windows[:, element] >> bits
    return windows, u


def search(targets: I64, bits: int) -> I64:
    """Codes [rows, head_dim] for targets in 128ths of a level."""
    rows, head_dim = targets.shape
    join = min(head_dim, JOIN_BITS // bits)
    metrics = np.zeros((rows, 256 >> bits), np.int64)
    metrics, _ = _run(targets[:, :join], bits, metrics)
    metrics, decisions = _run(targets[:, head_dim - join :], bits, metrics)
    _, u = _follow(decisions, bits, metrics.argmin(axis=1))
    start = np.full((rows, 256 >> bits), WRONG_START, np.int64)
    start[np.arange(rows), u] = 0
    _, decisions = _run(targets, bits, start)
    windows, _ = _follow(decisions, bits, u)
    return windows & ((1 << bits) - 1)


def pack(codes: I64, bits: int) -> U8:
    """Each row's codes as a string of bits, the lowest first."""
    string = (codes[..., None] >> np.arange(bits) & 1).reshape(len(codes), -1)
    return np.packbits(string.astype(np.uint8), axis=1, bitorder="little")


def levels_of(packed: U8, bits: int) -> I64:
    """Levels [rows, head_dim] of rows of packed codes."""
    string = np.unpackbits(packed, axis=1, bitorder="little").astype(np.int64)
    head_dim = string.shape[1] // bits
    places = (np.arange(head_dim)[:, None] * bits + np.arange(8)) % string.shape[1]
    window = (string[:, places] << np.arange(8)).sum(axis=2)
    return np.asarray(tables()[bits][1][window])


def sum_of(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums rows in eight interleaved parts."""
    parts = np.zeros((len(terms), 8))
    for first in range(0, terms.shape[1], 8):
        parts = parts + terms[:, first : first + 8]
    parts = parts[:, :4] + parts[:, 4:]
    parts = parts[:, :2] + parts[:, 2:]
    return np.asarray(parts[:, 0] + parts[:, 1])


def encode(values: F32, bits: int, unused: int = 0) -> tuple[U8, F32]:
    """Packed codes and scales, not rounded, of clamped rows; both zero where a row is too small for any scale.

    `unused`: last channels, zeros that scales do not depend on.
    """
    wide = values.astype(np.float64)
    channels = values.shape[1] - unused
    rms = np.sqrt(sum_of(wide * wide) / channels) / tables()[bits][0]
    step = np.maximum(rms, np.abs(wide).max(axis=1) / 255)
    factor = (128 / np.where(step < 2.0**-30, np.inf, step)).astype(np.float32)
    targets = np.rint(np.clip(values * factor[:, None], np.float32(-32640), np.float32(32640)))
    packed = pack(search(targets.astype(np.int64), bits), bits)
    levels = levels_of(packed, bits)
    energy = np.maximum((levels * levels)[:, :channels].sum(axis=1), 1)
    scale = (sum_of(wide * levels) / energy).astype(np.float32)
    small = step < 2.0**-30
    packed[small] = 0
    return packed, np.where(small, np.float32(0), scale)
