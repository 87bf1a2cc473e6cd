"""Number formats of the KV cache: their names, and the bytes that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvanta import _core
from kvanta.errors import InputError
from kvanta.values import one_line, real_number, text, truth, whole_number


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
    outliers: Sequence[int] = (),
    through_exact_page: bool = False,
) -> bytes:
    """The canonical bytes of one cell (one KV head, one page) from float32 [tokens, head_dim].

    `scheme` is a name or the explicit syntax, `side` "k" or "v". `through_exact_page`: round the transformed rows to
    bfloat16 first, as the cache does for schemes that keep the open page exact. `outliers`: channels of K, ascending,
    as many as +outliers=N says; they follow the cell in bfloat16. Raises InputError.
    """
    values = _floats("x", x, 2)
    centre = None if mean is None else _floats("mean", mean, 1)
    _check_texts(scheme, side)
    scale = real_number("static_scale", static_scale, -_FLOAT32_MAX, _FLOAT32_MAX)
    exact = truth("through_exact_page", through_exact_page)
    return _core.encode_cell(scheme, side, values, scale, centre, _channels(outliers), exact)


def decode(
    scheme: str,
    side: str,
    data: bytes,
    shape: tuple[int, int],
    *,
    static_scale: float = 1.0,
    mean: ArrayLike | None = None,
    outliers: Sequence[int] = (),
) -> NDArray[np.float32]:
    """float32 [tokens, head_dim] = `shape` from canonical bytes: what attention reads. Raises InputError."""
    centre = None if mean is None else _floats("mean", mean, 1)
    _check_texts(scheme, side)
    scale = real_number("static_scale", static_scale, -_FLOAT32_MAX, _FLOAT32_MAX)
    return _core.decode_cell(scheme, side, _bytes(data), _cell_shape(shape), scale, centre, _channels(outliers))


# Types and what C++'s types hold are checked here, ranges by the library.
_FLOAT32_MAX = 3.4e38


def _check_texts(scheme: object, side: object) -> None:
    text("scheme", scheme)
    text("side", side)


def _channels(values: Sequence[int]) -> list[int]:
    return [whole_number("an outlier channel", channel, -(2**31), 2**31 - 1) for channel in values]


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


def _floats(name: str, values: ArrayLike, axes: int) -> NDArray[np.float32]:
    try:
        array = np.ascontiguousarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is not an array of numbers: {error}") from None
    if array.ndim != axes:
        raise InputError(f"{name} has shape {array.shape}; {axes} axes are needed")
    return array
