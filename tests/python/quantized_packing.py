"""Quantizes weights as the hub's producers pack them, and dequantizes them with torch.

The packing is written here by the producers' descriptions, apart from the reader's code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Quantized = tuple[Tensors, torch.Tensor]
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
BNB_FP4 = torch.tensor(
    [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
     -0.0, -0.0052083333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25]
)  # fmt: skip


# ---- FP8


def fp8(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and their values for a scale that broadcasts over the weight."""
    codes = (weight / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes, codes.float() * scale


def block_scales(weight: torch.Tensor, size: int = 128) -> torch.Tensor:
    rows, columns = (-(-n // size) for n in weight.shape)
    padded = torch.zeros(rows * size, columns * size)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.reshape(rows, size, columns, size).abs().amax((1, 3)) / E4M3_MAX


def spread(scales: torch.Tensor, shape: torch.Size, size: int = 128) -> torch.Tensor:
    return scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: shape[0], : shape[1]]


def fp8_blocks(name: str, modelopt: bool = False) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        scales = block_scales(weight)
        codes, values = fp8(weight, spread(scales, weight.shape))
        return {"weight": codes, name: scales[:, None, :, None] if modelopt else scales}, values

    return quantize


def fp8_tensor(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().max() / E4M3_MAX
    codes, values = fp8(weight, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.37)}, values


def fp8_channel(weight: torch.Tensor) -> Quantized:
    scale = (weight.abs().amax(1, keepdim=True) / E4M3_MAX).bfloat16()
    codes, values = fp8(weight, scale.float())
    return {"weight": codes, "weight_scale": scale}, values


# ---- integers


def groups_of(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.reshape(weight.shape[0], -1, size)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows][words] of unsigned codes [rows][n]: a dense stream of bits, the lowest first."""
    rows, count = codes.shape
    stream = (codes.long()[..., None] >> torch.arange(bits)) & 1
    stream = torch.nn.functional.pad(stream.reshape(rows, -1), (0, -count * bits % 32))
    words = (stream.reshape(rows, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def affine(weight: torch.Tensor, size: int, bits: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    """Unsigned codes [out][in], scales and zero points [out][groups], values."""
    grouped = groups_of(weight, size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).to(dtype)
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.reshape(weight.shape).int(), scales, zeros.int(), values.reshape(weight.shape)


def symmetric(weight: torch.Tensor, size: int, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Signed codes [out][in], scales [out][groups], values."""
    grouped = groups_of(weight, size)
    scales = (grouped.abs().amax(-1) / (2 ** (bits - 1) - 0.5)).to(dtype)
    codes = (grouped / scales.float()[..., None]).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    values = codes * scales.float()[..., None]
    return codes.reshape(weight.shape).int(), scales, values.reshape(weight.shape)


def int8_channel(weight: torch.Tensor) -> Quantized:
    codes, scales, values = symmetric(weight, weight.shape[1], 8, torch.bfloat16)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, values


def int8_asymmetric(weight: torch.Tensor) -> Quantized:
    codes, scales, zeros, values = affine(weight, weight.shape[1], 8, torch.float32)
    parts = {"weight": codes - 128, "weight_zero_point": zeros - 128}
    return {**{name: part.to(torch.int8) for name, part in parts.items()}, "weight_scale": scales}, values


def packed(bits: int, size: int | None, with_zeros: bool = False) -> Callable[[torch.Tensor], Quantized]:
    """pack-quantized of compressed-tensors."""

    def quantize(weight: torch.Tensor) -> Quantized:
        group = size or weight.shape[1]
        tensors = {"weight_shape": torch.tensor(weight.shape)}
        if with_zeros:
            codes, scales, zeros, values = affine(weight, group, bits, torch.bfloat16)
            tensors["weight_zero_point"] = pack_rows(zeros.T, bits).T.contiguous()
        else:
            codes, scales, values = symmetric(weight, group, bits, torch.bfloat16)
            codes = codes + 2 ** (bits - 1)
        return {**tensors, "weight_packed": pack_rows(codes, bits), "weight_scale": scales}, values

    return quantize


def gptq(
    bits: int, size: int | None, act_order: bool = False, v2: bool = False, ragged: bool = False
) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        columns = weight.shape[1]
        group = size or columns
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if act_order else None
        sorted_weight = weight if order is None else weight[:, order]
        codes, scales, zeros, values = affine(sorted_weight, group, bits)
        g_idx = torch.arange(columns) // group
        if order is not None:  # column order[i] has the place i
            inverse = torch.argsort(order)
            codes, values, g_idx = codes[:, inverse], values[:, inverse], g_idx[inverse]
        if ragged:  # the first group lends the second a column
            taken = int(torch.nonzero(g_idx == 0)[0])
            g_idx[taken] = 1
            values[:, taken] = (codes[:, taken] - zeros[:, 1]) * scales[:, 1].float()
        # As GPTQModel: words less one in every code, with borrows between codes.
        words = pack_rows(zeros.T, bits)
        if not v2:
            words = (words.long() - pack_rows(torch.ones_like(zeros.T), bits).long()).to(torch.int32)
        return {
            "qweight": pack_rows(codes, bits).T.contiguous(),
            "qzeros": words,
            "scales": scales.T.contiguous(),
            "g_idx": g_idx.int(),
            "bias": torch.zeros(weight.shape[0], dtype=torch.float16),  # as AutoGPTQ wrote for layers without one
        }, values

    return quantize


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(size: int) -> Callable[[torch.Tensor], Quantized]:
    def pack(codes: torch.Tensor) -> torch.Tensor:  # [n][out] -> [n][out / 8]
        return pack_rows(codes.reshape(codes.shape[0], -1, 8)[..., AWQ_ORDER].reshape(codes.shape), 4)

    def quantize(weight: torch.Tensor) -> Quantized:
        codes, scales, zeros, values = affine(weight, size, 4)
        parts = {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.contiguous()}
        return parts, values

    return quantize


# ---- FP4 and bitsandbytes


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (values[..., None] - table).abs().argmin(-1)


def e2m1(values: torch.Tensor) -> torch.Tensor:
    return nearest(values.abs(), E2M1) + 8 * (values < 0)


def nvfp4(modelopt: bool) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        tensor_scale = weight.abs().max() / (6 * E4M3_MAX)
        divisor = 1 / tensor_scale
        grouped = groups_of(weight, 16)
        codes_of_scales = (grouped.abs().amax(-1) / 6 / tensor_scale).clamp(2**-9, E4M3_MAX).to(E4M3)
        scales = codes_of_scales.float() * tensor_scale if modelopt else codes_of_scales.float() / divisor
        codes = e2m1(grouped / scales[..., None])
        values = torch.cat((E2M1, -E2M1))[codes] * scales[..., None]
        flat = codes.reshape(weight.shape).to(torch.uint8)
        packed_codes = flat[:, ::2] | flat[:, 1::2] << 4
        tensors = {"weight" if modelopt else "weight_packed": packed_codes, "weight_scale": codes_of_scales}
        if modelopt:
            tensors |= {"weight_scale_2": tensor_scale, "input_scale": torch.tensor(0.01)}
        else:
            tensors |= {"weight_global_scale": divisor[None], "input_global_scale": torch.tensor([70.0])}
        return tensors, values.reshape(weight.shape)

    return quantize


def mxfp4(name: str) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        grouped = groups_of(weight, 32)
        exponents = (torch.log2(grouped.abs().amax(-1)).floor() - 2).int()
        scales = torch.exp2(exponents.float())
        codes = e2m1(grouped / scales[..., None])
        values = torch.cat((E2M1, -E2M1))[codes] * scales[..., None]
        flat = codes.reshape(weight.shape).to(torch.uint8)
        tensors = {name: flat[:, ::2] | flat[:, 1::2] << 4, "weight_scale": (exponents + 127).to(torch.uint8)}
        return tensors, values.reshape(weight.shape)

    return quantize


def mxfp8(weight: torch.Tensor) -> Quantized:
    grouped = groups_of(weight, 32)
    exponents = (torch.log2(grouped.abs().amax(-1)).floor() - 8).int()
    scales = torch.exp2(exponents.float())[..., None]
    codes = (grouped / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    tensors = {"weight": codes.reshape(weight.shape), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (codes.float() * scales).reshape(weight.shape)


def bitsandbytes_4bit(kind: str, table: torch.Tensor, nested: bool) -> Callable[[torch.Tensor], Quantized]:
    def quantize(weight: torch.Tensor) -> Quantized:
        blocks = torch.nn.functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).reshape(-1, 64)
        absmax = blocks.abs().amax(-1).clamp(min=1e-6)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
        tensors: Tensors = {"weight.quant_map": table.clone()}
        if nested:
            offset = absmax.mean()
            outer = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).reshape(-1, 256)
            maxima = outer.abs().amax(-1)
            levels = torch.linspace(-1, 1, 256) ** 3  # dense around zero, as the dynamic map
            codes = nearest(outer / maxima[:, None], levels)
            absmax = (levels[codes] * maxima[:, None]).reshape(-1)[: len(absmax)] + offset
            tensors |= {
                "weight.absmax": codes.reshape(-1)[: len(absmax)].to(torch.uint8),
                "weight.nested_absmax": maxima,
                "weight.nested_quant_map": levels,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            tensors["weight.absmax"] = absmax
        codes = nearest(blocks / absmax[:, None], table)
        values = (table[codes] * absmax[:, None]).reshape(-1)[: weight.numel()].reshape(weight.shape)
        flat = codes.reshape(-1)[: weight.numel()].to(torch.uint8)
        tensors["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return tensors, values

    return quantize


def bitsandbytes_int8(weight: torch.Tensor) -> Quantized:
    scales = weight.abs().amax(1)
    codes = (weight / scales[:, None] * 127).round().to(torch.int8)
    values = codes.float() * scales[:, None] * 7.874015718698502e-3
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values
