"""Number formats of the KV cache: their names, and the bytes that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvanta import _core
from kvanta.errors import InputError
from kvanta.params.arrays import channel_lists, float_array
from kvanta.params.checks import one_line, real_number, text, truth, whole_number

RECOMMENDED = ("int8", "k=int6_g32,v=int4", "int5_g32", "int4", "int4+query", "int4+exact=2", "t3", "klt3")
"""Formats to try first, by size (docs/eval.md)."""


def names() -> list[str]:
    """Canonical names of all formats."""
    return _core.format_names()


def table() -> list[dict[str, Any]]:
    """One row per format: name, aliases, summary, bits_per_element, scale, block, hadamard, exact, sink_pages, and
    backends, the families of those that attend to the format in its stored form: "cpu", "cuda" and "reference", whether
    this machine runs them or not (kvanta.attention.backends() does).
    """
    return _core.format_table()


def encode(
    scheme: str,
    side: str,
    x: ArrayLike,
    *,
    static_scale: float = 1.0,
    mean: ArrayLike | None = None,
    query: ArrayLike | None = None,
    eigen: ArrayLike | None = None,
    outliers: Sequence[int] = (),
    through_exact_page: bool = False,
) -> bytes:
    """The canonical bytes of one cell (one KV head, one page) from float32 [tokens, head_dim].

    `scheme` is a name or the explicit syntax, `side` "k" or "v". `through_exact_page`: round the transformed rows to
    bfloat16 first, as the cache does for schemes that keep the open page exact. `outliers`: channels of K, ascending,
    as many as +outliers=N says; they follow the cell in bfloat16. `mean` [head_dim]: of +mean and +query.
    `static_scale`: of formats with static scales alone.

    `query` [head_dim, head_dim]: the head's matrix of +query, and in klt3 and klt2 (also _g64) instead `eigen`
    [head_dim + 1, head_dim], its eigen-channels above their deviations: a KV head of k_query and k_eigen in scale
    files and of calibrate(..., query=True).query (docs/scales.md). Raises InputError.
    """
    values = float_array("x", x, ("tokens", "head_dim"))
    arrays = _calibrated(scheme, side, static_scale, mean, query, eigen, outliers, values.shape[1])
    exact = truth("through_exact_page", through_exact_page)
    return _core.encode_cell(scheme, side, values, **arrays, through_exact_page=exact)


def decode(
    scheme: str,
    side: str,
    data: bytes,
    shape: tuple[int, int],
    *,
    static_scale: float = 1.0,
    mean: ArrayLike | None = None,
    query: ArrayLike | None = None,
    eigen: ArrayLike | None = None,
    outliers: Sequence[int] = (),
) -> NDArray[np.float32]:
    """float32 [tokens, head_dim] = `shape` from canonical bytes: what attention reads, in the space of encode's `x`.

    The other arguments are those that the bytes were encoded with. Raises InputError.
    """
    size = _cell_shape(shape)
    arrays = _calibrated(scheme, side, static_scale, mean, query, eigen, outliers, size[1])
    return _core.decode_cell(scheme, side, _bytes(data), size, **arrays)


# Types, shapes and what C++'s types hold are checked here, ranges by the library.
_FLOAT32_MAX = 3.4e38


def _calibrated(
    scheme: object,
    side: object,
    static_scale: float,
    mean: ArrayLike | None,
    query: ArrayLike | None,
    eigen: ArrayLike | None,
    outliers: Sequence[int],
    head_dim: int,
) -> dict[str, Any]:
    text("scheme", scheme)
    text("side", side)
    square = None if query is None else float_array("query", query, (head_dim, head_dim))
    rows = None if eigen is None else float_array("eigen", eigen, (head_dim + 1, head_dim))
    return {
        "static_scale": real_number("static_scale", static_scale, -_FLOAT32_MAX, _FLOAT32_MAX),
        "mean": None if mean is None else float_array("mean", mean, (head_dim,)),
        "query": None if square is None else square[np.newaxis],
        "eigen": None if rows is None else rows[np.newaxis],
        "outliers": channel_lists("outliers", outliers, ("channels",)),
    }


def _bytes(data: Any) -> bytes:
    try:
        return memoryview(data).tobytes()
    except TypeError:  # a number too: bytes(n) would make n zeros of it
        raise InputError(f"data must be bytes, got {one_line(data)}") from None


def _cell_shape(shape: Any) -> tuple[int, int]:
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise InputError(f"shape must be two numbers (tokens, head_dim), got {one_line(shape)}")
    tokens, head_dim = (whole_number("an axis of shape", axis, -(2**31), 2**31 - 1) for axis in shape)
    return tokens, head_dim
