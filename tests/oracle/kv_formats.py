"""The cache formats once more, in numpy and ml_dtypes, written from the specification and not from the C++.

Rows in, canonical cell bytes out, and back. What this and src/formats agree on is what docs/formats.md says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import klt
import numpy as np
import trellis
from kv_cells import (
    BF16,
    E2M1,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    F32,
    FP16,
    FP32,
    U8,
    Cell,
    DType,
    Format,
    unpack_fields,
)
from kv_encoders import ENCODERS, cast_saturating, hadamard, lloyd_max
from numpy.typing import NDArray

__all__ = ["DEFAULT_HADAMARD", "FORMATS", "NAMES", "Cell", "cast_saturating", "decode", "encode", "hadamard"]


def _float(code: DType, *, per_head: bool = False) -> Format:
    return Format("cast", float_code=code, per_head=per_head)


def _signed(bits: int) -> Format:
    lowest = -(1 << (bits - 1))
    return Format("signed", bits=bits, lowest=lowest, block_scale=FP16, block=32, hadamard=True)


def _row_steps(bits: int, *, rotated: bool = False) -> Format:
    return Format("unsigned", bits=bits, token_scale=FP16, token_zero=True, hadamard=rotated)


def _block_steps(bits: int) -> Format:
    return Format("unsigned", bits=bits, block_scale=FP16, block=32, block_zero=True)


def _lloyd(bits: int) -> Format:
    return Format("lloyd", bits=bits, token_scale=FP16, hadamard=True)


def _trellis(bits: int) -> Format:
    return Format("trellis", bits=bits, token_scale=FP16, hadamard=True)


def _klt(bits: int) -> Format:
    return Format("klt", bits=bits, token_scale=FP16, hadamard=True)


def _klt_group(bits: int) -> Format:
    return Format("klt_group", bits=bits, token_scale=FP16, token_group=klt.GROUP, hadamard=True)


def _e2m1(rule: str, scale: DType, block: int, *, per_head: bool = False) -> Format:
    return Format(rule, bits=4, block_scale=scale, block=block, per_head=per_head)


_E4M3_PER_HEAD = _float(E4M3, per_head=True)

FORMATS: dict[str, tuple[Format, Format]] = {
    name: entry if isinstance(entry, tuple) else (entry, entry)
    for name, entry in {
        "fp32": _float(FP32),
        "bf16": _float(BF16),
        "fp16": _float(FP16),
        "fp8_e4m3": _E4M3_PER_HEAD,
        "fp8_e5m2": _float(E5M2, per_head=True),
        "fp8_per_token_head": Format("fp8_row", float_code=E4M3, token_scale=FP32),
        "mxfp8": Format("mxfp8", float_code=E4M3, block_scale=E8M0, block=32),
        "mxfp6_e3m2": Format("mxfp6", bits=6, block_scale=E8M0, block=32),
        "int8": Format("int8", token_scale=FP16, hadamard=True),
        "int8_g32": Format("int8", block_scale=FP16, block=32, hadamard=True),
        "int6_g32": _signed(6),
        "int5_g32": _signed(5),
        "int4": _signed(4),
        "int4_per_token_head": _row_steps(4, rotated=True),
        "t4": _trellis(4),
        "int3_g32": _signed(3),
        "t3": _trellis(3),
        "klt3": (_klt(3), _trellis(3)),
        "klt3_g64": (_klt_group(3), _trellis(3)),
        "int2_g32": _signed(2),
        "t2": _trellis(2),
        "klt2": (_klt(2), _trellis(2)),
        "klt2_g64": (_klt_group(2), _trellis(2)),
        "nvfp4": _e2m1("nvfp4", E4M3, 16, per_head=True),
        "nvfp4_4over6": _e2m1("nvfp4_4over6", E4M3, 16, per_head=True),
        "mxfp4": _e2m1("mxfp4", E8M0, 32),
        "fp4_e2m1": _e2m1("fp4_ceil", E8M0, 16),
        "kivi4": (Format("unsigned", bits=4, token_group=32), _block_steps(4)),
        "kivi3": (Format("unsigned", bits=3, token_group=32), _block_steps(3)),
        "kivi2": (Format("unsigned", bits=2, token_group=32), _block_steps(2)),
        "turboquant_k8v4": (_E4M3_PER_HEAD, _row_steps(4)),
        "turboquant_4bit_nc": (_lloyd(4), _row_steps(4)),
        "turboquant_k3v4_nc": (_lloyd(3), _row_steps(4)),
        "turboquant_3bit_nc": (_lloyd(3), _row_steps(3)),
        "mla_fp8": Format("fp8_block", float_code=E4M3, block_scale=FP32, block=128, allow_partial_block=True),
        "mla_fp8_e5m2": Format("fp8_block", float_code=E5M2, block_scale=FP32, block=128, allow_partial_block=True),
        "mla_int8": Format("int8", block_scale=FP16, block=32),
        "mla_int4": Format("signed", bits=4, lowest=-8, block_scale=FP16, block=32),
        "mla_nvfp4": _e2m1("nvfp4", E4M3, 16),
    }.items()
}
"""Formats of K and V by name."""

NAMES = tuple(FORMATS)


def uncalibrated(name: str) -> str:
    """Scheme text of a name whose keys are encoded without a calibration."""
    return f"{name}-query" if FORMATS[name][0].rule.startswith("klt") else name


DEFAULT_HADAMARD = {name for name, (k, v) in FORMATS.items() if k.hadamard and v.hadamard}


def on_side(name: str, side: str) -> Format:
    return FORMATS[name]["kv".index(side)]


def encode(name: str, x: F32, *, side: str = "k", static_scale: float = 1.0, unused: int = 0) -> Cell:
    """Encodes transformed rows, f32 [tokens, padded head_dim], in the format that the name means on that side.

    `unused`: last channels, zeros that no scale depends on.
    """
    form = replace(on_side(name, side), unused=unused)
    # Division by the scale may overflow to infinity, which saturates; casts of NaN are meant.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return ENCODERS[form.rule](np.ascontiguousarray(x, np.float32), form, np.float32(static_scale))


def plane_sizes(form: Format, tokens: int, head_dim: int) -> dict[str, tuple[int, DType]]:
    """Elements and dtype of every plane of a cell, in canonical order."""
    blocks = tokens * head_dim // form.block_of(head_dim) if form.block else 0
    groups = tokens // form.token_group if form.token_group else 0
    by_bits = form.rule == "klt_group"
    of_group = (klt.section_bytes(head_dim), np.dtype(np.uint8)) if by_bits else (head_dim, FP16)
    planes: dict[str, tuple[int, DType | None]] = {
        "codes": (tokens * head_dim * form.row_bits // 8, np.dtype(np.uint8)),
        "block_scales": (blocks, form.block_scale),
        "block_zeros": (blocks, FP16 if form.block_zero else None),
        "token_scales": (tokens, form.token_scale),
        "token_zeros": (tokens, FP16 if form.token_zero else None),
        "channel_scales": (groups * of_group[0], of_group[1] if form.token_group else None),
        "channel_zeros": (groups * head_dim, FP16 if form.token_group and not by_bits else None),
    }
    return {name: (size, dtype) for name, (size, dtype) in planes.items() if dtype is not None}


def split(form: Format, data: bytes, tokens: int, head_dim: int) -> dict[str, NDArray[Any]]:
    """The planes of a cell's canonical bytes; codes as bytes, scales and zeros as f32."""
    planes: dict[str, NDArray[Any]] = {}
    offset = 0
    for name, (size, dtype) in plane_sizes(form, tokens, head_dim).items():
        plane = np.frombuffer(data, dtype, size, offset)
        planes[name] = plane if dtype == np.uint8 else plane.astype(np.float32)
        offset += -(-size * dtype.itemsize // 16) * 16
    assert offset == len(data)
    return planes


def _values(form: Format, codes: U8, head_dim: int) -> F32:
    """Values of codes, before any scale."""
    if form.float_code is not None:
        return codes.view(form.float_code).astype(np.float32)
    if form.bits == 8:
        return codes.view(np.int8).astype(np.float32)
    if form.rule == "trellis":
        return trellis.levels_of(codes, form.bits).astype(np.float32)
    if form.rule == "klt":
        return klt.levels_of(codes, klt.default_allocation(head_dim, form.bits)).astype(np.float32)
    fields = unpack_fields(codes, head_dim, form.bits)
    if form.rule == "lloyd":
        levels, step = lloyd_max(form.bits)
        return np.asarray(np.array(levels, np.float32)[fields] * step)
    if form.rule == "mxfp6":
        return np.asarray(fields.view(E3M2).astype(np.float32))
    if form.rule in {"nvfp4", "nvfp4_4over6", "mxfp4", "fp4_ceil"}:
        return np.asarray(fields.view(E2M1).astype(np.float32) + np.float32(0))  # -0 reads as +0
    return fields.astype(np.float32) + np.float32(form.lowest)


def decode(name: str, data: bytes, shape: tuple[int, int], *, side: str = "k", static_scale: float = 1.0) -> F32:
    """The inverse of encode and canonical: rows f32, still transformed. Scales multiply in the order of the planes."""
    form = on_side(name, side)
    tokens, head_dim = shape
    planes = split(form, data, tokens, head_dim)
    if form.rule == "klt_group":
        codes, sections = planes["codes"].reshape(tokens, -1), planes["channel_scales"].reshape(tokens // klt.GROUP, -1)
        scales = planes["token_scales"]
        groups = [slice(first, first + klt.GROUP) for first in range(0, tokens, klt.GROUP)]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.concatenate(
                [
                    klt.decode_group(codes[group], scales[group], section, head_dim, form.bits)
                    for group, section in zip(groups, sections, strict=True)
                ]
            )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        x = _values(form, planes["codes"].reshape(tokens, -1), head_dim)

        def spread(plane: str) -> F32:
            """A plane with a number per element."""
            values = planes[plane]
            if plane.startswith("block"):
                return np.repeat(values.reshape(tokens, -1), form.block_of(head_dim), axis=1)
            if plane.startswith("channel"):
                return np.repeat(values.reshape(-1, head_dim), form.token_group, axis=0)
            return values[:, None]

        for plane in planes:
            if plane.endswith("_scales"):
                x = x * spread(plane)
        if form.per_head:
            x = x * np.float32(static_scale)
        for plane in planes:
            if plane.endswith("_zeros"):
                x = x + spread(plane)
    return x
