"""The cache formats once more, in numpy and ml_dtypes, written from the specification and not from the C++.

Rows in, canonical cell bytes out. What this and src/formats agree on is what docs/formats.md says.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

FP16_MAX = np.float32(65504.0)
BLOCK = 32


@dataclass
class Cell:
    """Planes of one cell, a row per token, and what was counted."""

    codes: U8
    block_scales: U8 | None = None
    token_scales: U8 | None = None
    saturated: int = 0
    nan: int = 0

    def canonical(self) -> bytes:
        """The planes in order, each padded with zeros to 16 bytes."""
        planes = [plane.tobytes() for plane in (self.codes, self.block_scales, self.token_scales) if plane is not None]
        return b"".join(plane + bytes(-len(plane) % 16) for plane in planes)


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


def _count(x: F32, largest: np.float32) -> tuple[int, int]:
    """Values above the largest finite one (infinities included), and NaNs."""
    return int(np.sum(np.abs(x) > largest)), int(np.sum(np.isnan(x)))


def largest_finite(dtype: np.dtype[np.generic]) -> np.float32:
    return np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def cast_saturating(x: F32, dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """Nearest even, clamped to the largest finite value before the cast; NaN stays NaN."""
    largest = largest_finite(dtype)
    return np.clip(x, -largest, largest).astype(dtype)


def _cast_cell(x: F32, dtype: np.dtype[np.generic]) -> Cell:
    saturated, nan = _count(x, largest_finite(dtype))
    return Cell(cast_saturating(x, dtype).view(np.uint8), saturated=saturated, nan=nan)


def _clean(x: F32, largest: np.float32) -> F32:
    return np.where(np.isnan(x), np.float32(0), np.clip(x, -largest, largest)).astype(np.float32)


def _encode_int8(x: F32) -> Cell:
    largest = np.float32(127) * FP16_MAX
    saturated, nan = _count(x, largest)
    x = _clean(x, largest)
    scale = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float16)
    divisor = np.where(scale == 0, np.float32(np.inf), scale.astype(np.float32))
    codes: U8 = np.clip(np.rint(x / divisor[:, None]), -127, 127).astype(np.int8).view(np.uint8)
    return Cell(codes, token_scales=scale[:, None].view(np.uint8), saturated=saturated, nan=nan)


def _encode_int4(x: F32) -> Cell:
    tokens, head_dim = x.shape
    largest = np.float32(8) * FP16_MAX
    saturated, nan = _count(x, largest)
    above = np.any(np.abs(x.reshape(-1, BLOCK)) > largest, axis=1)
    blocks = _clean(x, largest).reshape(-1, BLOCK)
    first = np.abs(blocks).argmax(axis=1)  # the first of equals
    d = np.take_along_axis(blocks, first[:, None], axis=1)[:, 0] / np.float32(-8)
    divisor = np.where(d == 0, np.float32(np.inf), d)
    codes = np.clip(np.rint(blocks / divisor[:, None]), -8, 7).astype(np.float32)
    xq = np.zeros(len(blocks), np.float32)
    qq = np.zeros(len(blocks), np.float32)
    for channel in range(BLOCK):
        xq = xq + blocks[:, channel] * codes[:, channel]
        qq = qq + codes[:, channel] * codes[:, channel]
    with np.errstate(over="ignore"):
        scale = np.where(qq == 0, np.float32(0), xq / np.where(qq == 0, np.float32(1), qq)).astype(np.float16)
    saturated += int(np.sum(np.isinf(scale) & ~above))
    scale = np.clip(scale, np.float16(-65504), np.float16(65504))
    scale = np.where(scale == 0, np.float16(0), scale)  # no negative zero
    codes = np.where(scale[:, None] == 0, np.float32(0), codes)
    nibbles = (codes + 8).astype(np.uint8)
    packed = (nibbles[:, 0::2] + np.uint8(16) * nibbles[:, 1::2]).astype(np.uint8).reshape(tokens, head_dim // 2)
    scales = scale.astype(np.float16).reshape(tokens, head_dim // BLOCK)
    return Cell(packed, block_scales=scales.view(np.uint8), saturated=saturated, nan=nan)


def encode(name: str, x: F32, *, static_scale: float = 1.0) -> Cell:
    """Encodes transformed rows, f32 [tokens, head_dim], in the format of that canonical name."""
    x = np.ascontiguousarray(x, np.float32)
    # Division by the scale may overflow to infinity, which saturates; casts of NaN are meant.
    with np.errstate(over="ignore", invalid="ignore"):
        match name:
            case "fp32":
                return _cast_cell(x, np.dtype(np.float32))
            case "bf16":
                return _cast_cell(x, np.dtype(ml_dtypes.bfloat16))
            case "fp16":
                return _cast_cell(x, np.dtype(np.float16))
            case "fp8_e4m3":
                return _cast_cell(x / np.float32(static_scale), np.dtype(ml_dtypes.float8_e4m3fn))
            case "fp8_e5m2":
                return _cast_cell(x / np.float32(static_scale), np.dtype(ml_dtypes.float8_e5m2))
            case "int8":
                return _encode_int8(x)
            case "int4":
                return _encode_int4(x)
    raise ValueError(f"no format {name!r} here")


DEFAULT_HADAMARD = {"int8", "int4"}
NAMES = ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
