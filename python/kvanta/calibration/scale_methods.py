"""A static scale for E4M3 from a histogram of magnitudes: by the largest, a percentile, or least squared error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvanta import formats

METHODS = ("amax", "percentile", "mse")
_FORMAT = "fp8_e4m3"
LARGEST = 448.0
"""Largest E4M3 value: scale * LARGEST is the largest value that does not saturate."""

HEADROOM = 2.0
"""Default of `headroom`: a floating-point format loses no precision by it, and other texts exceed the largest value."""

# Candidates of "mse", as factors of the scale that "amax" gives: from 2 down to 1/16, 16 to an octave. Between two
# powers of two E4M3's error changes by a few per cent only.
_FACTORS = np.exp2(-np.arange(-16, 65) / 16.0)
_ROW = 256  # head_dim of the cells that values are encoded in


def _stored(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """`values` as a cache at scale 1.0 returns them."""
    flat = np.zeros(-(-values.size // _ROW) * _ROW, dtype=np.float32)
    flat[: values.size] = values.ravel()
    shape = (flat.size // _ROW, _ROW)
    back = formats.decode(_FORMAT, "k", formats.encode(_FORMAT, "k", flat.reshape(shape)), shape)
    return back.ravel()[: values.size].reshape(values.shape).astype(np.float64)


def _percentile_of(edges: NDArray[np.float32], histogram: NDArray[np.int64], amax: float, percentile: float) -> float:
    reached = np.cumsum(histogram) >= percentile / 100 * histogram.sum()
    bin_index = int(np.argmax(reached))
    # In the lowest bin nearly everything is zero, so the few other values decide.
    return amax if bin_index == 0 else min(amax, float(edges[bin_index + 1]))


def _least_error(edges: NDArray[np.float32], histogram: NDArray[np.int64], amax: float) -> float:
    used = np.flatnonzero(histogram)
    centres = (edges[used].astype(np.float64) + edges[used + 1]) / 2
    scales = amax / LARGEST * _FACTORS
    errors = _stored(centres / scales[:, None]) * scales[:, None] - centres
    return float(scales[np.argmin((errors**2 * histogram[used]).sum(axis=1))])


def static_scale(
    method: str,
    edges: NDArray[np.float32],
    histogram: NDArray[np.int64],
    amax: float,
    percentile: float = 99.99,
    headroom: float = HEADROOM,
) -> float:
    """The scale for values with this histogram [bins] of magnitudes, whose edges are [bins + 1]; 1.0 if all are zero.

    "amax": nothing saturates that is up to `headroom` times as large as the largest value. "percentile": that share, in
    per cent, does not. "mse": least squared error of what is stored, bins counted at their centres (they are 1/64 of an
    octave wide).
    """
    if amax == 0:
        return 1.0
    if method == "mse":
        return _least_error(edges, histogram, amax)
    if method == "percentile":
        return _percentile_of(edges, histogram, amax, percentile) / LARGEST
    return amax * headroom / LARGEST
