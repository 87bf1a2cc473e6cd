"""Storage of a cell of the cache formats: dtypes, fields of a format, planes, in numpy and ml_dtypes; written from the
specification and not from the C++.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
DType = np.dtype[np.generic]

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
E3M2 = np.dtype(ml_dtypes.float6_e3m2fn)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FP16 = np.dtype(np.float16)
FP32 = np.dtype(np.float32)

FP16_MAX = np.float32(65504.0)
F32_MAX = np.finfo(np.float32).max
FIELD_PLANES = {6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}  # bits of an element: widths of its bit planes


@dataclass(frozen=True)
class Format:
    """Storage of one side of a name. Scales are the dtypes of their sections; offsets (zeros) are fp16."""

    rule: str
    float_code: DType | None = None  # of 8 bits and more; else:
    bits: int = 8
    lowest: int = 0  # the value of field 0 of an integer code
    block_scale: DType | None = None
    block: int = 0
    allow_partial_block: bool = False  # a row of fewer channels is one block
    block_zero: bool = False
    token_scale: DType | None = None
    token_zero: bool = False
    token_group: int = 0
    per_head: bool = False
    hadamard: bool = False
    unused: int = 0  # last channels of the rows, which are zeros that no scale depends on

    @property
    def row_bits(self) -> int:
        return self.float_code.itemsize * 8 if self.float_code is not None else self.bits

    def block_of(self, head_dim: int) -> int:
        """Channels per block scale."""
        return min(self.block, head_dim) if self.allow_partial_block else self.block

    def head_dim_step(self, head_dim: int) -> int:
        """Channels of which a row has a multiple."""
        narrowest = min(FIELD_PLANES.get(self.row_bits, (8,)))
        return max(8, self.block_of(head_dim), 32 // narrowest)

    def padded(self, x: F32) -> F32:
        """Rows with zeros after their channels, up to the next multiple of the step."""
        head_dim = x.shape[1]
        return np.pad(x, ((0, 0), (0, -head_dim % self.head_dim_step(head_dim))))


@dataclass
class Cell:
    """Planes of one cell, in canonical order, and what was counted."""

    codes: U8
    block_scales: U8 | None = None
    block_zeros: U8 | None = None
    token_scales: U8 | None = None
    token_zeros: U8 | None = None
    channel_scales: U8 | None = None
    channel_zeros: U8 | None = None
    saturated: int = 0
    nan: int = 0

    def planes(self) -> list[U8]:
        every = (
            *(self.codes, self.block_scales, self.block_zeros, self.token_scales, self.token_zeros),
            *(self.channel_scales, self.channel_zeros),
        )
        return [plane for plane in every if plane is not None]

    def canonical(self) -> bytes:
        """The planes in order, each padded with zeros to 16 bytes."""
        planes = [plane.tobytes() for plane in self.planes()]
        return b"".join(plane + bytes(-len(plane) % 16) for plane in planes)


# ---- bit planes


def channel_of_field(width: int, index: int) -> tuple[int, int]:
    """Place of channel `index` in a plane of `width` bits: byte, and lowest bit in it."""
    per_byte = 8 // width
    unit, rest = divmod(index, 4 * per_byte)
    for byte in range(4):
        for i in range(per_byte):
            if 8 * (i // 2) + 2 * byte + i % 2 == rest:
                return 4 * unit + byte, width * i
    raise AssertionError("every channel has its place")


def pack_fields(fields: U8, bits: int) -> U8:
    """Fields [tokens, head_dim] to rows of bit planes: low bits of all channels, then high bits."""
    tokens, head_dim = fields.shape
    planes = []
    shift = 0
    for width in FIELD_PLANES[bits]:
        plane = np.zeros((tokens, head_dim * width // 8), np.uint8)
        for channel in range(head_dim):
            byte, low_bit = channel_of_field(width, channel)
            plane[:, byte] |= ((fields[:, channel] >> shift) & ((1 << width) - 1)) << low_bit
        planes.append(plane)
        shift += width
    return np.concatenate(planes, axis=1)


def unpack_fields(codes: U8, head_dim: int, bits: int) -> U8:
    fields = np.zeros((len(codes), head_dim), np.uint8)
    shift = 0
    begin = 0
    for width in FIELD_PLANES[bits]:
        for channel in range(head_dim):
            byte, low_bit = channel_of_field(width, channel)
            fields[:, channel] |= ((codes[:, begin + byte] >> low_bit) & ((1 << width) - 1)) << shift
        begin += head_dim * width // 8
        shift += width
    return fields
