"""Contribution of each layer to the divergence of a side, without the noise that any change of the cache makes.

The least change of the cache flips roundings of bf16 activations in all later layers, and these flips alone make a
divergence: on SmolLM2 1.5e-4 nats from the first layer, 3e-5 from the last, whatever the format. It does not add up:
all layers together have it once. Left in, it hides what the layers differ in.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_RELIABLE = 0.5  # of the noise: a format whose layers add less than that is too fine to tell them apart


def layer_divergences(single: Sequence[Floats], totals: Sequence[Floats]) -> list[Floats]:
    """Per side, nats [formats, layers]: each format's row adds up to its total without the noise.

    `single`: per side, divergences [formats, layers] of one layer alone, coarsest format first. `totals`: per side,
    [formats], of all layers at once. A format too fine to show its layers above the noise has the shares of the next
    coarser one.
    """
    measured = [rows for rows in single if len(rows)]
    layers = single[0].shape[1]
    noise = np.min(np.vstack(measured), axis=0) if measured else np.zeros(layers)
    result = []
    for rows, sums in zip(single, totals, strict=True):
        shares = np.full(layers, 1 / layers)
        costs = np.zeros_like(rows)
        for index, row in enumerate(rows):
            above = np.maximum(row - noise, 0.0)
            if above.sum() > (_RELIABLE * noise.sum() if index else 0.0):
                shares = above / above.sum()
            costs[index] = shares * max(sums[index] - noise.max(), 0.0)
        result.append(costs)
    return result
