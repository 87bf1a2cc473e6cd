"""The encoders of the cache formats, in numpy and ml_dtypes, written from the specification and not from the C++.

The cell that they fill: kv_cells.py. The names, and the whole of a cell there and back: kv_formats.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import klt
import ml_dtypes
import numpy as np
import trellis
from kv_cells import (
    E2M1,
    E3M2,
    E4M3,
    E8M0,
    F32,
    F32_MAX,
    FP16_MAX,
    U8,
    Cell,
    DType,
    Format,
    pack_fields,
)
from numpy.typing import NDArray


def hadamard(x: F32) -> F32:
    """Orthonormal Walsh-Hadamard over the last axis, in blocks of its largest power-of-two divisor, all in f32."""
    head_dim = x.shape[-1]
    block = head_dim & -head_dim
    y = x.astype(np.float32)
    stride = 1
    while stride < block:
        pairs = y.reshape(*x.shape[:-1], head_dim // (2 * stride), 2, stride)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([low + high, low - high], axis=-2).reshape(x.shape)
        stride *= 2
    return y * np.float32(1.0 / np.sqrt(float(block)))


# ---- pieces of encoders


def _count(x: F32, largest: np.float32) -> tuple[int, int]:
    """Counts of values above the largest finite one (infinities included), and of NaNs."""
    return int(np.sum(np.abs(x) > largest)), int(np.sum(np.isnan(x)))


def largest_finite(dtype: DType) -> np.float32:
    return np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def cast_saturating(x: NDArray[Any], dtype: DType) -> NDArray[np.generic]:
    """Nearest even, clamped to the largest finite value before the cast; NaN stays NaN."""
    largest = largest_finite(dtype)
    clipped: NDArray[np.generic] = np.clip(x, -largest, largest).astype(dtype)
    return clipped


def _clean(x: F32, largest: np.float32) -> F32:
    return np.where(np.isnan(x), np.float32(0), np.clip(x, -largest, largest)).astype(np.float32)


def _divisor(scale: NDArray[Any]) -> F32:
    """The scale in f32; infinity where it is zero, so that codes become zero."""
    wide = scale.astype(np.float32)
    return np.where(wide == 0, np.float32(np.inf), wide)


def fp16_scale(x: F32) -> tuple[NDArray[np.float16], NDArray[np.bool_]]:
    """Nearest fp16, never -0, clamped to +-65504; and where it was."""
    with np.errstate(over="ignore"):
        scale = x.astype(np.float16)
    above = np.isinf(scale)
    scale = np.clip(scale, np.float16(-65504), np.float16(65504))
    return np.where(scale == 0, np.float16(0), scale), above


def scale_bytes(scale: NDArray[Any], rows: int) -> U8:
    return np.ascontiguousarray(scale).reshape(rows, -1).view(np.uint8)


def floor_log2(x: F32) -> NDArray[np.int64]:
    """Exact, of subnormal numbers as well; of zero: the least that a scale can hold."""
    _, exponent = np.frexp(x.astype(np.float64))
    return np.where(x == 0, -127, exponent.astype(np.int64) - 1)


def e8m0_scale(exponent: NDArray[np.int64]) -> NDArray[Any]:
    return np.ldexp(1.0, np.clip(exponent, -127, 127)).astype(E8M0)


# ---- encoders: rows f32 [tokens, head_dim] -> Cell


def _cast(x: F32, form: Format, static_scale: np.float32) -> Cell:
    assert form.float_code is not None
    y = x / static_scale if form.per_head else x
    saturated, nan = _count(y, largest_finite(form.float_code))
    return Cell(cast_saturating(y, form.float_code).view(np.uint8), saturated=saturated, nan=nan)


def _fp8_row(x: F32, form: Format, _: np.float32) -> Cell:
    saturated, nan = _count(x, F32_MAX)
    assert form.float_code is not None
    largest = np.float32(ml_dtypes.finfo(form.float_code).max)  # type: ignore[no-untyped-call]
    scale = (np.abs(_clean(x, F32_MAX)).max(axis=1) / largest).astype(np.float32)[:, None]
    codes = cast_saturating(np.clip(x, -F32_MAX, F32_MAX) / _divisor(scale), form.float_code)
    return Cell(codes.view(np.uint8), token_scales=scale_bytes(scale, len(x)), saturated=saturated, nan=nan)


def _fp8_block(x: F32, form: Format, static_scale: np.float32) -> Cell:
    """Each block as a row of its own."""
    blocks = x.reshape(-1, form.block_of(x.shape[1]))
    cell = _fp8_row(blocks, form, static_scale)
    assert cell.token_scales is not None
    cell.block_scales = cell.token_scales.reshape(len(x), -1)
    cell.token_scales = None
    cell.codes = cell.codes.reshape(x.shape)
    return cell


def _mxfp8(x: F32, form: Format, _: np.float32) -> Cell:
    largest = np.float32(448 * 2.0**119)
    saturated, nan = _count(x, largest)
    amax = np.abs(_clean(x, largest)).reshape(len(x), -1, form.block).max(axis=2)
    scale = e8m0_scale(floor_log2(amax) - 8)
    codes = cast_saturating(x / np.repeat(scale.astype(np.float32), form.block, axis=1), E4M3)
    return Cell(codes.view(np.uint8), block_scales=scale_bytes(scale, len(x)), saturated=saturated, nan=nan)


def _int8(x: F32, form: Format, _: np.float32) -> Cell:
    largest = np.float32(127) * FP16_MAX
    saturated, nan = _count(x, largest)
    groups = _clean(x, largest).reshape(-1, form.block or x.shape[1])
    scale, _above = fp16_scale(np.abs(groups).max(axis=1) / np.float32(127))
    codes: U8 = np.clip(np.rint(groups / _divisor(scale)[:, None]), -127, 127).astype(np.int8).view(np.uint8)
    cell = Cell(codes.reshape(x.shape), saturated=saturated, nan=nan)
    if form.block:
        cell.block_scales = scale_bytes(scale, len(x))
    else:
        cell.token_scales = scale_bytes(scale, len(x))
    return cell


def _signed(x: F32, form: Format, _: np.float32) -> Cell:
    half = np.float32(1 << (form.bits - 1))
    largest = half * FP16_MAX
    saturated, nan = _count(x, largest)
    above = np.any(np.abs(x.reshape(-1, form.block)) > largest, axis=1)
    blocks = _clean(x, largest).reshape(-1, form.block)
    first = np.abs(blocks).argmax(axis=1)  # the first of equals
    d = np.take_along_axis(blocks, first[:, None], axis=1)[:, 0] / -half
    codes = np.clip(np.rint(blocks / _divisor(d)[:, None]), -half, half - 1).astype(np.float32)
    xq = np.zeros(len(blocks), np.float32)
    qq = np.zeros(len(blocks), np.float32)
    for channel in range(form.block):
        xq = xq + blocks[:, channel] * codes[:, channel]
        qq = qq + codes[:, channel] * codes[:, channel]
    scale, scale_above = fp16_scale(np.where(qq == 0, np.float32(0), xq / np.where(qq == 0, np.float32(1), qq)))
    saturated += int(np.sum(scale_above & ~above))
    codes = np.where(scale[:, None] == 0, np.float32(0), codes)
    fields = (codes + half).astype(np.uint8).reshape(x.shape)
    packed = pack_fields(fields, form.bits)
    return Cell(packed, block_scales=scale_bytes(scale, len(x)), saturated=saturated, nan=nan)


def _unsigned(x: F32, form: Format, _: np.float32) -> Cell:
    saturated, nan = _count(x, FP16_MAX)
    tokens, head_dim = x.shape
    top = np.float32((1 << form.bits) - 1)
    # Groups of values that share a scale along the last axis.
    groups = _clean(x, FP16_MAX)
    if form.token_group:
        groups = groups.reshape(-1, form.token_group, head_dim).transpose(0, 2, 1)
    else:
        groups = groups.reshape(tokens, -1, form.block or head_dim)
    used = np.ones(groups.shape, bool)
    if not form.token_group:
        used = np.broadcast_to(np.arange(head_dim) < head_dim - form.unused, x.shape).reshape(groups.shape)
    low = groups.min(axis=2, where=used, initial=np.inf)
    high = groups.max(axis=2, where=used, initial=-np.inf)
    scale, _above = fp16_scale((high - low) / top)
    zero, _above = fp16_scale(low)
    steps = np.rint((groups - zero.astype(np.float32)[..., None]) / _divisor(scale)[..., None])
    fields = np.where(used, np.clip(steps, 0, top), 0).astype(np.uint8)
    if form.token_group:
        fields = fields.transpose(0, 2, 1)
    cell = Cell(pack_fields(fields.reshape(x.shape), form.bits), saturated=saturated, nan=nan)
    rows = len(scale)
    name = "channel" if form.token_group else "block" if form.block else "token"
    setattr(cell, f"{name}_scales", scale_bytes(scale, rows))
    setattr(cell, f"{name}_zeros", scale_bytes(zero, rows))
    return cell


def _mxfp6(x: F32, form: Format, _: np.float32) -> Cell:
    largest = np.float32(28 * 2.0**123)
    blocks = _clean(x, largest).reshape(len(x), -1, form.block)
    scale = e8m0_scale(floor_log2(np.abs(blocks).max(axis=2)) - 4)
    codes = cast_saturating(blocks / scale.astype(np.float32)[..., None], E3M2)
    saturated, nan = _count(x, largest)
    packed = pack_fields(codes.reshape(x.shape).view(np.uint8), 6)
    return Cell(packed, block_scales=scale_bytes(scale, len(x)), saturated=saturated, nan=nan)


def _e2m1_cell(codes: NDArray[Any], scale: NDArray[Any], counted: tuple[int, int]) -> Cell:
    packed = pack_fields(codes.view(np.uint8), 4)
    return Cell(packed, block_scales=scale_bytes(scale, len(codes)), saturated=counted[0], nan=counted[1])


def _mxfp4(x: F32, form: Format, _: np.float32) -> Cell:
    largest = np.float32(6 * 2.0**125)  # times 8 / 6 it would be more than f32 holds
    blocks = _clean(x, largest).reshape(len(x), -1, form.block)
    amax = np.abs(blocks).max(axis=2)
    exponent = floor_log2(amax) - 2
    if form.rule == "fp4_ceil":  # the least power of two of which amax is at most six
        exponent += amax.astype(np.float64) > 6 * np.ldexp(1.0, exponent)
    scale = e8m0_scale(exponent)
    codes = cast_saturating(blocks / scale.astype(np.float32)[..., None], E2M1)
    return _e2m1_cell(codes.reshape(x.shape), scale, _count(x, largest))


def _nvfp4(x: F32, form: Format, static_scale: np.float32) -> Cell:
    largest = np.float32(6 * 448)
    y = x / static_scale if form.per_head else x
    blocks = _clean(y, largest).reshape(len(x), -1, form.block)
    amax = np.abs(blocks).max(axis=2)

    def under(divisor: int) -> tuple[NDArray[Any], NDArray[Any], F32]:
        """Scale, codes and squared error, summed in channel order."""
        scale = cast_saturating(amax / np.float32(divisor), E4M3)
        wide = scale.astype(np.float32)[..., None]
        codes = cast_saturating(blocks / np.where(wide == 0, np.float32(np.inf), wide), E2M1)
        codes = np.where(wide == 0, np.zeros((), E2M1), codes)
        difference = blocks - codes.astype(np.float32) * wide
        error = np.zeros(amax.shape, np.float32)
        for channel in range(form.block):
            error = error + difference[..., channel] * difference[..., channel]
        return scale, codes, error

    scale, codes, error = under(6)
    if form.rule == "nvfp4_4over6":
        other_scale, other_codes, other_error = under(4)
        better = other_error < error
        scale = np.where(better, other_scale, scale)
        codes = np.where(better[..., None], other_codes, codes)
    return _e2m1_cell(codes.reshape(x.shape), scale, _count(y, largest))


@cache
def lloyd_max(bits: int) -> tuple[tuple[int, ...], np.float32]:
    """Levels that err least on N(0, 1), by Lloyd's iteration, in steps of the largest / 127; and the step."""
    count = 1 << bits
    levels = [(2 * i + 1 - count) * 3.0 / count for i in range(count)]
    for _ in range(5000):
        edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
        density = [math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi) for edge in edges]
        below = [(1 + math.erf(edge / math.sqrt(2))) / 2 for edge in edges]
        levels = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(count)]
    step = np.float32(round(levels[-1], 4)) / np.float32(127)
    return tuple(round(level / float(step)) for level in levels), step


def _lloyd(x: F32, form: Format, _: np.float32) -> Cell:
    levels, step = lloyd_max(form.bits)
    saturated, nan = _count(x, FP16_MAX)
    y = _clean(x, FP16_MAX).astype(np.float64)[:, : x.shape[1] - form.unused]
    square = np.zeros(len(y))
    for channel in range(y.shape[1]):
        square = square + y[:, channel] * y[:, channel]
    unit = np.sqrt(square / y.shape[1]) * np.float64(step)
    steps = y / np.where(unit == 0, np.inf, unit)[:, None]
    # By the middles between levels, the lower of two that are equally near: distances would be rounded.
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(levels)])
    fields = (steps[..., None] > middles).sum(axis=2)
    level_square = np.square(np.array(levels)[fields]).sum(axis=1).astype(np.float64)
    scale, above = fp16_scale((np.sqrt(square / level_square) / np.float64(step)).astype(np.float32))
    saturated += int(np.sum(above & ~np.any(np.abs(x) > FP16_MAX, axis=1)))
    fields[scale == 0] = len(levels) // 2 - 1  # as of a row of zeros
    padding = np.full((len(x), form.unused), len(levels) // 2 - 1)
    codes = pack_fields(np.concatenate([fields, padding], axis=1).astype(np.uint8), form.bits)
    return Cell(codes, token_scales=scale_bytes(scale, len(x)), saturated=saturated, nan=nan)


def _trellis(x: F32, form: Format, _: np.float32) -> Cell:
    return _trellis_cell(x, lambda values: trellis.encode(values, form.bits, form.unused))


def _klt(x: F32, form: Format, _: np.float32) -> Cell:
    return klt_cell(x, klt.default_allocation(x.shape[1], form.bits))


def klt_cell(x: F32, allocation: klt.Allocation) -> Cell:
    return _trellis_cell(x, lambda values: klt.encode(values, allocation))


def _trellis_cell(x: F32, encode: Callable[[F32], tuple[U8, F32]]) -> Cell:
    """Cell of rows that `encode` turns into packed codes and scales."""
    largest = np.float32(32) * FP16_MAX
    saturated, nan = _count(x, largest)
    packed, unrounded = encode(_clean(x, largest))
    scale, above = fp16_scale(unrounded)
    saturated += int(np.sum(above & ~np.any(np.abs(x) > largest, axis=1)))
    packed[scale == 0] = 0
    return Cell(packed, token_scales=scale_bytes(scale, len(x)), saturated=saturated, nan=nan)


def _klt_group(x: F32, form: Format, _: np.float32) -> Cell:
    """Rows in the order and scale of their group, then as those of klt."""
    largest = np.float32(32) * FP16_MAX
    calibrated = klt.default_deviations(x.shape[1])
    codes, scales, sections = [], [], []
    saturated = nan = 0
    for first in range(0, len(x), klt.GROUP):
        rows = x[first : first + klt.GROUP]
        section, allocation, group = klt.group_of(_clean(rows, largest), calibrated, form.bits)
        scaled = rows[:, group.channels] * (np.float32(1) / group.scales)
        cell = klt_cell(scaled, allocation)
        assert cell.token_scales is not None
        codes.append(cell.codes)
        scales.append(cell.token_scales)
        sections.append(section)
        saturated, nan = saturated + cell.saturated, nan + cell.nan
    planes = [np.concatenate(plane) for plane in (codes, scales, sections)]
    return Cell(planes[0], token_scales=planes[1], channel_scales=planes[2], saturated=saturated, nan=nan)


ENCODERS: dict[str, Callable[[F32, Format, np.float32], Cell]] = {
    "cast": _cast,
    "fp8_row": _fp8_row,
    "fp8_block": _fp8_block,
    "mxfp8": _mxfp8,
    "int8": _int8,
    "signed": _signed,
    "unsigned": _unsigned,
    "mxfp6": _mxfp6,
    "mxfp4": _mxfp4,
    "fp4_ceil": _mxfp4,
    "nvfp4": _nvfp4,
    "nvfp4_4over6": _nvfp4,
    "lloyd": _lloyd,
    "trellis": _trellis,
    "klt": _klt,
    "klt_group": _klt_group,
}
