"""Writes tests/data/golden: vectors that pin every encoder's bytes, and hashes of exhaustive conversions.

python tests/oracle/make_format_golden.py [FOLDER]

inputs.json      rows as f32 bits, hexadecimal, little endian
<format>.json    canonical cell bytes of these rows, per scheme, side and static scale, with what was counted, and
                 FNV-1a-64 of what the bytes decode to, still transformed
exhaustive.json  FNV-1a-64 of every 1,024 results: each float of 4 to 16 bits from all bf16 and all fp16 values, and
                 the value of each of their codes; the power-of-two scale of a block of which each of these values is
                 the largest. NaNs are hashed as all ones below the sign
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import kv_formats
import ml_dtypes
import numpy as np
from kv_cells import BF16, E2M1, E3M2, E4M3, E5M2, E8M0, F32, FP16

FOLDER = Path(__file__).resolve().parent.parent / "data" / "golden"
CHUNK = 1024


def normal() -> F32:
    return np.random.default_rng(1).standard_normal((8, 64), np.float32)


def ties() -> F32:
    """Values halfway between codes: of int8 and int4 at scale 1, of the fp8 formats, of bf16 and fp16."""
    rows = [
        [127, *(k + 0.5 for k in range(-16, 15))],
        [-127, *(4 * k + 0.5 for k in range(-15, 16))],
        [-8, *(k / 2 for k in range(-15, 16))],
        [8, *(-k / 2 for k in range(-15, 16))],  # the mirror: d is negative
        [(1 + (2 * k + 1) / 16) * 2.0**e for k in range(8) for e in (-6, 0, 5, 8)],
        [(2 * k + 1) * 2.0**-10 for k in range(32)],  # e4m3's subnormals
        [(1 + (2 * k + 1) / 8) * 2.0**e for k in range(4) for e in (-14, -1, 0, 3, 9, 13, 14, 15)],
        [(1 + (2 * k + 1) / 256) for k in range(16)] + [(1 + (2 * k + 1) / 2048) for k in range(16)],
    ]
    return np.array(rows, np.float32)


def extremes() -> F32:
    largest = float(np.finfo(np.float32).max)
    rows = [
        [0.0] * 32,
        [-0.0, 0.0] * 16,
        [1e-45, -1e-45, 1e-40, 1.1754944e-38] * 8,
        [1e-8, -3e-8, 2.9802322e-08, 6e-8] * 8,  # around fp16's smallest scale
        [1e-4, 1.0, 448.0, 449.0, 464.0, 465.0, -480.0, 57344.0] * 4,
        [65504.0, 65519.0, 65520.0, -65536.0, 524032.0, 524033.0, 8319008.0, 8319009.0] * 4,
        [np.inf, -np.inf, largest, -largest, 3.3895314e38, 3.3961775e38, 1.0, 0.0] * 4,
        [np.nan, -np.nan, 1.0, -2.0, 3.0, 0.0, 0.5, -7.0] * 4,
        [524032.0, -524032.0] + [0.0] * 30,  # int4: the value fits, its scale does not
        [7.0] * 32,  # constant
        [-1e30] * 32,
    ]
    return np.array(rows, np.float32)


def wide() -> F32:
    """Twelve orders of magnitude; head_dim 96 has Hadamard blocks of 32."""
    random = np.random.default_rng(2)
    return (random.standard_normal((4, 96)) * 10.0 ** random.uniform(-6, 6, (4, 96))).astype(np.float32)


def biased() -> F32:
    """A constant per channel, as biased keys have; head_dim 80 has Hadamard blocks of 16, and no blocks of 32."""
    random = np.random.default_rng(3)
    return (random.standard_normal((5, 80)) + random.standard_normal(80) * 20).astype(np.float32)


def asymmetric() -> F32:
    """Groups with a zero: ties between steps, constants that fp16 does not have, zeros of either sign."""
    random = np.random.default_rng(7)
    rows = [
        [-8, 7, *(k / 2 - 8 for k in range(30))],  # 15 steps of 1
        [5, 8, *(5 + k / 10 for k in range(30))],  # 3 steps of 1
        [100, 107, *(100 + k / 4 for k in range(30))],  # 7 steps of 1
        [0.1] * 32,
        [1000.3] * 31 + [1000.4],
        [0.0, -0.0] * 16,
        [-0.0] * 31 + [1.0],
        [1e-9] * 31 + [-1e-9],
        [65504.0, -65504.0, *range(30)],
        [-65504.0] * 32,
        [65504.0, 65519.0, 65505.0, 65503.0] * 8,
        [40000.0] * 16 + [-65504.0] * 16,
        list(random.standard_normal(32) + 50),
        list(random.exponential(size=32)),
        list(random.standard_normal(32) * 1e-5),
        [1e-7 * k for k in range(32)],
    ]
    return np.array(rows, np.float32)


def powers() -> F32:
    """Around what power-of-two and E4M3 scales decide: 4, 6 and 448 times powers of two, and the largest f32."""
    up, down = np.float32(np.inf), np.float32(0)

    def block(largest: float, toward: np.float32 | None = None) -> list[float]:
        amax = np.float32(largest)
        if toward is not None:
            amax = np.nextafter(amax, toward)
        fractions = [1, 0, -0.0, *(k / 24 for k in range(1, 14))]
        return [float(amax * np.float32(fraction)) for fraction in fractions]

    rows = [
        [*block(6), *block(6, up)],
        [*block(6, down), *block(-6 * 2.0**9)],
        [*block(4), *block(4, down)],
        [*block(8), *block(8, down)],
        [*block(448), *block(449)],
        [*block(2.0**-126), *block(6 * 2.0**-127)],
        [*block(6 * 2.0**-127, up), *block(1e-40)],
        [*block(6 * 2.0**-128, up), *block(-3e-45)],
        [*block(6 * 2.0**125), *block(6 * 2.0**125, up)],
        [*block(448 * 2.0**119), *block(448 * 2.0**119, up)],
        [*block(3.4e38), *block(2.0**127)],
        [*block(2688), *block(2688, up)],
        [*block(1792), *block(6 * 2.0**-10)],  # 4 * 448; below, and at, half the least E4M3
        [*block(6 * 1.0625), *block(6 * 2.0**-10, up)],  # a scale halfway between two
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 6.0, -6.0] * 2,
        [0.1] * 15 + [4.0] + [-3.0] * 15 + [4.4],  # fits of four and of six
    ]
    return np.array(rows, np.float32)


def keys() -> F32:
    """Two groups of 32 tokens: channels with large means of their own."""
    random = np.random.default_rng(8)
    return (random.standard_normal((64, 32)) + random.standard_normal(32) * 10).astype(np.float32)


def columns() -> F32:
    """A token group whose channels are the groups of `asymmetric` and of `extremes`, and a tail of its own."""
    return np.concatenate([asymmetric(), extremes(), powers()[:5]]).T.copy()


def latents() -> F32:
    """Blocks of 128 channels of magnitudes of their own."""
    random = np.random.default_rng(9)
    magnitudes = np.array([1, 30, 1e-3, 0, 1e-42, 448]).repeat(128).reshape(3, 256)
    x: F32 = (random.standard_normal((3, 256)) * magnitudes).astype(np.float32)
    return x


INPUTS = {
    "normal": normal,
    "ties": ties,
    "extremes": extremes,
    "wide": wide,
    "biased": biased,
    "asymmetric": asymmetric,
    "powers": powers,
    "keys": keys,
    "columns": columns,
    "latents": latents,
}
TOKEN_GROUPS = ("keys", "columns")  # inputs for formats with token groups alone
WILD = ("extremes", "asymmetric", "powers", "columns")  # infinities and NaN would spread over a transformed row


def sides(name: str) -> list[str]:
    k, v = kv_formats.FORMATS[name]
    return ["kv"] if k == v else ["k", "v"]


def cases(name: str) -> list[dict[str, Any]]:
    """All vectors of one format: every input as it is, and the tame ones through its default transform."""
    out = []
    for side, label in itertools.product(sides(name), INPUTS):
        x = INPUTS[label]()
        form = kv_formats.on_side(name, side[0])
        tokens, head_dim = x.shape
        if head_dim % form.head_dim_step(head_dim) != 0 or (form.token_group and tokens % form.token_group != 0):
            continue  # padded rows: tests/python/test_formats_oracle.py
        if label in TOKEN_GROUPS and form.token_group == 0:
            continue
        if label == "latents" and not form.allow_partial_block:  # nothing new to the others
            continue
        transforms = [False, True] if form.hadamard and label not in WILD else [False]
        scales = [1.0, 0.037] if form.per_head else [1.0]
        for rotate, scale in itertools.product(transforms, scales):
            rows = kv_formats.hadamard(x) if rotate else x
            cell = kv_formats.encode(name, rows, side=side[0], static_scale=scale)
            decoded = kv_formats.decode(name, cell.canonical(), rows.shape, side=side[0], static_scale=scale)
            modifier = "" if rotate == form.hadamard else "+hadamard" if rotate else "-hadamard"
            out.append(
                {
                    "input": label,
                    "scheme": kv_formats.uncalibrated(name) + modifier,
                    "side": side,
                    "static_scale": scale,
                    "saturated": cell.saturated,
                    "nan": cell.nan,
                    "bytes": cell.canonical().hex(),
                    "decoded": chunk_hashes(canonical_nan(decoded.reshape(-1)), decoded.size)[0],
                }
            )
    return out


def chunk_hashes(values: np.ndarray[Any, Any], chunk: int = CHUNK) -> list[str]:
    """FNV-1a-64 of each run of 1,024 values' little-endian bytes."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1, min(chunk, len(values)) * values.itemsize)
    hashes = np.full(len(data), 0xCBF29CE484222325, np.uint64)
    for column in data.T:
        hashes = (hashes ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
    return [f"{value:016x}" for value in hashes]


def canonical_nan(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits of 16- or 32-bit floats, NaNs as 0x7fff / 0x7fffffff: a payload is no part of any format."""
    unsigned = np.dtype(f"u{values.itemsize}")
    ones = unsigned.type((1 << (8 * values.itemsize - 1)) - 1)
    return np.where(np.isnan(values.astype(np.float32)), ones, values.view(unsigned))


def power_scales(name: str, x: F32) -> np.ndarray[Any, Any]:
    """The scale byte of a block that has one value and zeros."""
    rows = np.zeros((len(x), 32), np.float32)
    rows[:, 0] = x
    scales = kv_formats.encode(name, rows).block_scales
    assert scales is not None
    return np.ascontiguousarray(scales[:, 0])


def exhaustive() -> dict[str, list[str]]:
    all_codes = np.arange(65536, dtype=np.uint16)
    sources = {"bf16": all_codes.view(ml_dtypes.bfloat16), "fp16": all_codes.view(np.float16)}
    targets = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2, "bf16": BF16, "fp16": FP16}
    hashes = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for source, values in sources.items():
            x = values.astype(np.float32)
            for target, dtype in targets.items():
                encoded = kv_formats.cast_saturating(x, dtype)
                result = encoded.view(np.uint8) if dtype.itemsize == 1 else canonical_nan(encoded)
                hashes[f"{target} from {source}"] = chunk_hashes(result)
            numbers = np.where(np.isnan(x), np.float32(0), x)  # E2M1 and E3M2 have no NaN
            for name, dtype in (("e2m1", E2M1), ("e3m2", E3M2)):
                hashes[f"{name} from {source}"] = chunk_hashes(
                    kv_formats.cast_saturating(numbers, dtype).view(np.uint8)
                )
            for name in ("mxfp8", "mxfp6_e3m2", "mxfp4", "fp4_e2m1"):
                hashes[f"{name} scale from {source}"] = chunk_hashes(power_scales(name, x))
        for target, dtype in {**targets, "e2m1": E2M1, "e3m2": E3M2, "e8m0": E8M0}.items():
            codes = np.arange(256, dtype=np.uint8) if dtype.itemsize == 1 else all_codes
            codes = codes[: {E2M1: 16, E3M2: 64}.get(dtype, len(codes))]
            hashes[f"fp32 from {target}"] = chunk_hashes(canonical_nan(codes.view(dtype).astype(np.float32)))
    return hashes


def files() -> dict[str, str]:
    """Name and text of every file."""
    inputs = [
        {"name": name, "tokens": len(make()), "head_dim": make().shape[1], "x": make().tobytes().hex()}
        for name, make in INPUTS.items()
    ]
    contents: dict[str, Any] = {"inputs.json": {"inputs": inputs}, "exhaustive.json": exhaustive()}
    for name in kv_formats.NAMES:
        contents[f"{name}.json"] = {"format": name, "cases": cases(name)}
    return {name: json.dumps(content, indent=1) + "\n" for name, content in contents.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, text in files().items():
        (folder / file_name).write_text(text)
