"""Checks of arrays from users; each raises an InputError that names the array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvanta.errors import InputError
from kvanta.params.checks import whole_number


def float_array(name: str, values: ArrayLike, shape: Sequence[int | str]) -> NDArray[np.float32]:
    """float32 of this shape, contiguous. A text in `shape` names an axis of any size from 1."""
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("it has complex numbers")
        array = array.astype(np.float32, order="C", copy=False)
    except (TypeError, ValueError, OverflowError) as error:  # OverflowError: integers beyond every float
        raise InputError(f"{name} is not an array of numbers: {error}") from None
    _check_shape(name, array.shape, shape)
    return array


def channel_lists(name: str, values: ArrayLike, shape: Sequence[int | str]) -> list[int]:
    """Numbers of channels, one row after another, from whole numbers of this shape, or from none."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{name} is not an array of numbers: {error}") from None
    if array.size == 0:
        return []
    _check_shape(name, array.shape, shape)
    return [whole_number("an outlier channel", channel, 0, 2**31 - 1) for channel in array.ravel().tolist()]


def _check_shape(name: str, found: tuple[int, ...], expected: Sequence[int | str]) -> None:
    if len(found) != len(expected) or any(
        size != axis if isinstance(axis, int) else size == 0 for size, axis in zip(found, expected, strict=True)
    ):
        axes = ", ".join(axis if isinstance(axis, str) else str(axis) for axis in expected)
        each = ", with at least one in each axis" if 0 in found else ""
        raise InputError(f"{name} has shape {list(found)}; expected [{axes}]{each}")
