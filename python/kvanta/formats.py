"""Number formats of the KV cache: their names, and the bytes that they make."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvanta import _core
from kvanta.errors import InputError


def names() -> list[str]:
    """Canonical names of all formats."""
    return _core.format_names()


def table() -> list[dict[str, Any]]:
    """One row per format: name, aliases, summary, bits_per_element, scale, block, hadamard, exact, sink_pages."""
    return _core.format_table()


def encode(
    scheme: str,
    side: str,
    x: ArrayLike,
    *,
    static_scale: float = 1.0,
    mean: ArrayLike | None = None,
    through_exact_page: bool = False,
) -> bytes:
    """The canonical bytes of one cell (one KV head, one page) from float32 [tokens, head_dim].

    `scheme` is a name or the explicit syntax, `side` "k" or "v". `through_exact_page`: round the transformed rows to
    bfloat16 first, as the cache does for schemes that keep the open page exact. Raises InputError.
    """
    values = _floats("x", x, 2)
    centre = None if mean is None else _floats("mean", mean, 1)
    return _core.encode_cell(scheme, side, values, static_scale, centre, through_exact_page)


def decode(
    scheme: str,
    side: str,
    data: bytes,
    shape: tuple[int, int],
    *,
    static_scale: float = 1.0,
    mean: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """float32 [tokens, head_dim] = `shape` from canonical bytes: what attention reads. Raises InputError."""
    centre = None if mean is None else _floats("mean", mean, 1)
    return _core.decode_cell(scheme, side, bytes(data), shape, static_scale, centre)


def _floats(name: str, values: ArrayLike, axes: int) -> NDArray[np.float32]:
    try:
        array = np.ascontiguousarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is not an array of numbers: {error}") from None
    if array.ndim != axes:
        raise InputError(f"{name} has shape {array.shape}; {axes} axes are needed")
    return array
