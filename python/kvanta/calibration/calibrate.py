"""Calibration of a model on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvanta.calibration.query_matrices import QueryMatrices, collect_query_moments, query_matrices
from kvanta.calibration.scale_methods import HEADROOM, LARGEST, METHODS, static_scale
from kvanta.calibration.statistics import KvReader, KvStatistics, collect_statistics
from kvanta.errors import InputError
from kvanta.params.checks import real_number, whole_number
from kvanta.text.prompts import token_list

GRANULARITIES = ("tensor", "head")
OUTLIER_MEASURES = ("amax", "variance")


class LayerCalibration(NamedTuple):
    """The part of one layer: [1] or [kv_heads] scales, [kv_heads, head_dim] means, [kv_heads, n] outliers."""

    k_scale: NDArray[np.float32]
    v_scale: NDArray[np.float32]
    k_mean: NDArray[np.float32] | None
    k_outliers: NDArray[np.int64] | None


@dataclass(frozen=True)
class Calibration:
    """Result of calibrate(). Sizes are the most of any layer: `of_layer` has a layer's own."""

    granularity: str
    """"tensor": one scale per layer and side; "head": one per KV head."""
    method: str
    window: int
    """Tokens of the sequences in which the text was read."""
    k_scale: NDArray[np.float32]
    """[layers, 1] or [layers, kv_heads]; as v_scale."""
    v_scale: NDArray[np.float32]
    k_mean: NDArray[np.float32] | None
    """[layers, kv_heads, head_dim]"""
    k_outliers: NDArray[np.int64] | None
    """[layers, kv_heads, n]: channels, ascending."""
    tokens: int
    layer_heads: Sequence[tuple[int, int]]
    """[layers]: KV heads, and the channels of each."""
    statistics: KvStatistics | None
    """Statistics; None from calibrate_query()."""
    query: QueryMatrices | None = None
    """Matrices for +query."""

    @property
    def strategy(self) -> str:
        """The granularity as compressed-tensors calls it."""
        return "attn_head" if self.granularity == "head" else "tensor"

    def of_layer(self, layer: int) -> LayerCalibration:
        """The calibration of one layer, without the padding after its heads and channels."""
        heads, channels = self.layer_heads[layer]
        return LayerCalibration(
            self.k_scale[layer][:heads],
            self.v_scale[layer][:heads],
            None if self.k_mean is None else self.k_mean[layer][:heads, :channels],
            None if self.k_outliers is None else self.k_outliers[layer][:heads],
        )


def calibrate_query(
    llm: KvReader,
    token_ids: Sequence[int] | NDArray[np.integer],
    window: int,
    eigen_channels: bool = True,
    lengths: Sequence[int] | None = None,
) -> Calibration:
    """The matrices and means of +query, and scales by "amax" per head, from one reading of the text.

    `eigen_channels`: with those of klt3 and klt2, which take half of the time again. `lengths`: as of
    collect_query_moments().
    """
    tokens = token_list(token_ids, llm.model_info.vocab)
    found = collect_query_moments(llm, tokens, window, weighted=eigen_channels, lengths=lengths)
    matrices = query_matrices(found)
    scales = np.maximum(found.amax * np.float32(HEADROOM / LARGEST), np.finfo(np.float32).tiny)
    return Calibration(
        granularity="head",
        method="amax",
        window=window,
        k_scale=scales[:, 0],
        v_scale=scales[:, 1],
        k_mean=matrices.means,
        k_outliers=None,
        tokens=len(token_ids),
        layer_heads=llm.model_info.layer_heads,
        statistics=None,
        query=matrices,
    )


def _scales(
    found: KvStatistics, side: int, granularity: str, method: str, percentile: float, headroom: float
) -> NDArray[np.float32]:
    histogram, amax = found.histogram[:, side], found.amax[:, side].max(axis=-1)
    if granularity == "tensor":
        histogram, amax = histogram.sum(axis=1, keepdims=True), amax.max(axis=1, keepdims=True)
    scales = np.empty(amax.shape, dtype=np.float32)
    for place in np.ndindex(*amax.shape):
        scales[place] = static_scale(method, found.edges, histogram[place], float(amax[place]), percentile, headroom)
    # A head of denormal values: a scale must be a positive float32.
    return np.maximum(scales, np.finfo(np.float32).tiny)


def _describe(method: str, percentile: float, headroom: float) -> str:
    return {"percentile": f"percentile {percentile:g}", "amax": f"amax x {headroom:g}"}.get(method, method)


def _outlier_channels(found: KvStatistics, count: int, measure: str) -> NDArray[np.int64]:
    size = found.amax[:, 0] if measure == "amax" else found.deviations()[:, 0]
    # Stable, so that of equal channels the first are taken.
    return np.sort(np.argsort(-size, axis=-1, kind="stable")[..., :count], axis=-1)


def calibrate(
    llm: KvReader,
    token_ids: Sequence[int] | NDArray[np.integer],
    *,
    window: int | None = None,
    granularity: str = "tensor",
    method: str = "amax",
    percentile: float = 99.99,
    headroom: float = HEADROOM,
    key_mean: bool = False,
    outliers: int = 0,
    outliers_by: str = "amax",
    query: bool = False,
) -> Calibration:
    """Static E4M3 scales, and with `key_mean` the key means, from the keys and values that `llm` makes of a text.

    The text is read in windows of `window` tokens (default: max_model_len) on exact pages, whatever the format of
    `llm`. `method`: "amax", "percentile" (that share of the values, in per cent, does not saturate) or "mse" (least
    squared error). `headroom`: factor by which other texts may exceed the largest value before it saturates (method
    "amax"). With `key_mean` the text is read twice, and a scale of K is the larger of what K and K - mean need:
    it serves a cache with +mean and one without. `outliers`: that many channels of K per head, those with the largest
    magnitude or (`outliers_by` "variance") the largest variance. `query`: the matrices of +query, and with them key
    means, from a text of at least 8,192 tokens, which is read once more. Raises InputError.
    """
    info, longest = llm.model_info, llm.config.max_model_len
    tokens = token_list(token_ids, info.vocab)
    if not tokens:
        raise InputError("the text is empty: it has no tokens")
    window = whole_number("window", longest if window is None else window, 1, longest)
    percentile = real_number("percentile", percentile, 0, 100, open_below=True)
    headroom = real_number("headroom", headroom, 1, 64)
    outliers = whole_number("outliers", outliers, 0, min(channels for _, channels in info.layer_heads))
    if outliers % 2 != 0:
        raise InputError(f"outliers must be even, as +outliers=N is, got {outliers}")
    for name, value, known in (
        ("granularity", granularity, GRANULARITIES),
        ("method", method, METHODS),
        ("outliers_by", outliers_by, OUTLIER_MEASURES),
    ):
        if value not in known:
            raise InputError(f"{name} is {value!r}; known: {', '.join(known)}")

    matrices = query_matrices(collect_query_moments(llm, tokens, window)) if query else None
    means = matrices.means if matrices is not None else None
    found = collect_statistics(llm, tokens, window)
    k_scale = _scales(found, 0, granularity, method, percentile, headroom)
    if key_mean:
        if means is None:
            means = np.ascontiguousarray(found.means()[:, 0], dtype=np.float32)
        centred = collect_statistics(llm, tokens, window, means, "reading again without the key means")
        k_scale = np.maximum(k_scale, _scales(centred, 0, granularity, method, percentile, headroom))
    return Calibration(
        granularity=granularity,
        method=_describe(method, percentile, headroom),
        window=window,
        k_scale=k_scale,
        v_scale=_scales(found, 1, granularity, method, percentile, headroom),
        k_mean=means,
        k_outliers=_outlier_channels(found, outliers, outliers_by) if outliers else None,
        tokens=found.tokens,
        layer_heads=info.layer_heads,
        statistics=found,
        query=matrices,
    )
