"""Matrices of +query: for each layer and KV head a transform of keys that knows the queries (docs/adr/0042)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvanta.calibration.statistics import KvReader
from kvanta.errors import InputError
from kvanta.terminal.progress import progress_bar

MIN_TOKENS = 8192
"""Fewer do not determine the second moments of a head of 128 channels well."""
_REGULARIZATION = 1e-3
_WEIGHTED_REGULARIZATION = 0.3
"""Regularization of weighted queries: few carry most of the weight, and others come after the calibration."""
_Float64 = NDArray[np.float64]


@dataclass
class QueryMoments:
    """See QueryMoments in include/kvanta/stats.h."""

    tokens: int
    amax: NDArray[np.float32]
    """[layers, 2, kv_heads]"""
    key_sum: _Float64
    """[layers, kv_heads, head_dim]"""
    key_moment: _Float64
    """[layers, kv_heads, head_dim, head_dim], as query_moment."""
    query_moment: _Float64
    weighted_query_moment: _Float64 | None = None
    """Moment of weighted queries; None if not requested."""

    def add(self, other: QueryMoments) -> None:
        """Adds the sums of another text of the same model."""
        self.tokens += other.tokens
        self.amax = np.maximum(self.amax, other.amax)
        self.key_sum += other.key_sum
        self.key_moment += other.key_moment
        self.query_moment += other.query_moment
        if self.weighted_query_moment is not None and other.weighted_query_moment is not None:
            self.weighted_query_moment += other.weighted_query_moment


def context_lengths(window: int, longest: int) -> list[int]:
    """Contexts over whose positions keys and queries are averaged: `window` and its doublings, up to the model's.

    `window` is there three times, because most sequences are short.
    """
    lengths = [min(window, longest)] * (3 if window < longest else 1)
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    return lengths


def collect_query_moments(
    llm: KvReader,
    token_ids: Sequence[int],
    window: int,
    what: str = "reading keys and queries",
    weighted: bool = True,
    lengths: Sequence[int] | None = None,
) -> QueryMoments:
    """Forwards the text in windows of `window` tokens, each a separate sequence. Raises InputError if it is short.

    `weighted`: as of LLM.query_moments(), and `lengths`: its context_lengths, by default those of context_lengths().
    """
    if lengths is None:
        lengths = context_lengths(window, llm.model_info.max_position)
    if len(token_ids) < MIN_TOKENS:
        raise InputError(
            f"the text has {len(token_ids):,} tokens: +query needs at least {MIN_TOKENS:,} to know keys and queries"
        )
    total: QueryMoments | None = None
    with progress_bar(len(token_ids), what, "token") as bar:
        for begin in range(0, len(token_ids), window):
            tokens = token_ids[begin : begin + window]
            part = QueryMoments(**llm.query_moments(tokens, weighted, lengths))
            bar.update(len(tokens))
            if total is None:
                total = part
            else:
                total.add(part)
    if total is None or total.tokens < MIN_TOKENS // 2:
        raise InputError(
            f"windows of {window:,} tokens leave too few after the first page, which is always exact; give longer "
            "ones (--max-model-len)"
        )
    return total


def _power(matrix: _Float64, exponent: float) -> _Float64:
    """A power of a symmetric positive definite matrix."""
    values, vectors = np.linalg.eigh(matrix)
    result: _Float64 = (vectors * values**exponent) @ vectors.T
    return result


def _regularized(moment: _Float64, part: float = _REGULARIZATION) -> _Float64:
    size = len(moment)
    trace = float(np.trace(moment))
    if not trace > 0:  # a dead head: nothing to know
        return np.eye(size)
    result: _Float64 = (moment + moment.T) / (2 * trace / size) + part * np.eye(size)
    return result


def _hadamard(size: int) -> _Float64:
    """The orthonormal transform of formats::Hadamard: blocks of the largest power of two that divides `size`."""
    block: _Float64 = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), block)
    result: _Float64 = np.kron(np.eye(size // len(block)), block / np.sqrt(len(block)))
    return result


def query_matrix(keys: _Float64, queries: _Float64) -> NDArray[np.float32]:
    """A = H M^1/2 with M = S^-1/2 (S^1/2 Q S^1/2)^1/2 S^-1/2, scaled to the norm of a rotation.

    `keys` S, `queries` Q: second moments [d, d], keys about their mean; both are regularized here. M is the geometric
    mean of S^-1 and Q: in its space keys and queries have the same moments, so the error of a rounded key, which is
    alike in all directions after H, weighs least on the logits. Scales of the moments have no influence.
    """
    s, q = _regularized(keys), _regularized(queries)
    root, inverse_root = _power(s, 0.5), _power(s, -0.5)
    mean = inverse_root @ _power(root @ q @ root, 0.5) @ inverse_root
    result = _hadamard(len(s)) @ _power((mean + mean.T) / 2, 0.5)
    scaled: NDArray[np.float32] = (result * np.sqrt(len(s) / np.sum(result**2))).astype(np.float32)
    return scaled


def eigen_channels(keys: _Float64, queries: _Float64) -> NDArray[np.float32]:
    """[d + 1, d] of klt3 and klt2: W, whose rows make uncorrelated channels of variance 1 of a key, and a row of their
    standard deviations in units of what an error weighs, falling.

    `keys` S: as of query_matrix; `queries` Q: second moment, each query weighted by what an error of its logits costs.
    W = D^-1 U' Q^1/2 with the eigenvectors U and eigenvalues D^2 of Q^1/2 S Q^1/2: an error of D W k is an error of the
    weighted logits, and D^2 says how many bits each channel deserves.
    """
    s, q = _regularized(keys), _regularized(queries, _WEIGHTED_REGULARIZATION)
    root = _power(q, 0.5)
    variances, vectors = np.linalg.eigh(root @ s @ root)
    deviations = np.sqrt(np.maximum(variances[::-1], np.finfo(np.float32).tiny))
    size = len(keys)
    key_scale = np.sqrt(size / np.trace(keys)) if np.trace(keys) > 0 else 1.0
    whitened = (vectors[:, ::-1].T @ root) / deviations[:, None] * key_scale
    # Rounded so that equal deviations stay in order.
    return np.vstack([whitened, np.minimum.accumulate(deviations)]).astype(np.float32)


@dataclass(frozen=True)
class QueryMatrices:
    """Means and matrices of +query."""

    means: NDArray[np.float32]
    """[layers, kv_heads, head_dim]"""
    matrices: NDArray[np.float32]
    """[layers, kv_heads, head_dim, head_dim]"""
    eigen: NDArray[np.float32] | None
    """[layers, kv_heads, head_dim + 1, head_dim]: for klt3 and klt2; None without weighted queries."""

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Values of the layers by the name that files give to one layer's."""
        return {"k_query": self.matrices} | ({} if self.eigen is None else {"k_eigen": self.eigen})


def query_matrices(found: QueryMoments) -> QueryMatrices:
    """The key means, matrices and eigen-channels of +query. Raises InputError if moments are not finite."""
    means = found.key_sum / found.tokens
    layers, heads, size = means.shape
    matrices = np.empty((layers, heads, size, size), dtype=np.float32)
    weighted = found.weighted_query_moment
    eigen = None if weighted is None else np.empty((layers, heads, size + 1, size), dtype=np.float32)
    for place in np.ndindex(layers, heads):
        mean = means[place]
        covariance = found.key_moment[place] / found.tokens - np.outer(mean, mean)
        matrices[place] = query_matrix(covariance, found.query_moment[place] / found.tokens)
        if weighted is not None and eigen is not None:
            # Windows of two pages or less have no query that reads a quantized page.
            queries = weighted[place] if weighted[place].any() else found.query_moment[place]
            eigen[place] = eigen_channels(covariance, queries)
    result = QueryMatrices(means.astype(np.float32), matrices, eigen)
    if not all(np.isfinite(values).all() for values in result.tensors().values()):
        raise InputError("cannot calibrate +query: the moments of keys and queries are not finite")
    return result
