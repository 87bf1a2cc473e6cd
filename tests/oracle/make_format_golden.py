"""Writes tests/data/golden: vectors that pin every encoder's bytes, and hashes of exhaustive conversions.

python tests/oracle/make_format_golden.py [FOLDER]

inputs.json      rows as f32 bits, hexadecimal, little endian
<format>.json    canonical cell bytes of these rows, per scheme and static scale, with what was counted
exhaustive.json  FNV-1a-64 of every 1,024 results: each 8- and 16-bit float from all bf16 and all fp16 values, and
                 the value of each of their codes; NaNs are hashed as all ones below the sign
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kv_formats
import ml_dtypes
import numpy as np
from kv_formats import F32

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


INPUTS = {"normal": normal, "ties": ties, "extremes": extremes, "wide": wide, "biased": biased}


def cases(name: str) -> list[dict[str, Any]]:
    """All vectors of one format: every input as it is, and the finite ones through its default transform."""
    out = []
    for label, make in INPUTS.items():
        x = make()
        if name == "int4" and x.shape[1] % kv_formats.BLOCK:
            continue
        transforms = [False, True] if name in kv_formats.DEFAULT_HADAMARD and label != "extremes" else [False]
        scales = [1.0, 0.037] if name.startswith("fp8") else [1.0]
        for rotate in transforms:
            for scale in scales:
                cell = kv_formats.encode(name, kv_formats.hadamard(x) if rotate else x, static_scale=scale)
                minus = "" if rotate or name not in kv_formats.DEFAULT_HADAMARD else "-hadamard"
                out.append(
                    {
                        "input": label,
                        "scheme": name + minus,
                        "static_scale": scale,
                        "saturated": cell.saturated,
                        "nan": cell.nan,
                        "bytes": cell.canonical().hex(),
                    }
                )
    return out


def chunk_hashes(values: np.ndarray[Any, Any]) -> list[str]:
    """FNV-1a-64 of each run of 1,024 values' little-endian bytes."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(-1, min(CHUNK, len(values)) * values.itemsize)
    hashes = np.full(len(data), 0xCBF29CE484222325, np.uint64)
    for column in data.T:
        hashes = (hashes ^ column.astype(np.uint64)) * np.uint64(0x100000001B3)
    return [f"{value:016x}" for value in hashes]


def canonical_nan(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bits of 16- or 32-bit floats, NaNs as 0x7fff / 0x7fffffff: a payload is no part of any format."""
    unsigned = np.dtype(f"u{values.itemsize}")
    ones = unsigned.type((1 << (8 * values.itemsize - 1)) - 1)
    return np.where(np.isnan(values.astype(np.float32)), ones, values.view(unsigned))


def exhaustive() -> dict[str, list[str]]:
    all_codes = np.arange(65536, dtype=np.uint16)
    sources = {"bf16": all_codes.view(ml_dtypes.bfloat16), "fp16": all_codes.view(np.float16)}
    targets = {
        "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
        "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
        "bf16": np.dtype(ml_dtypes.bfloat16),
        "fp16": np.dtype(np.float16),
    }
    hashes = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for source, values in sources.items():
            x = values.astype(np.float32)
            for target, dtype in targets.items():
                encoded = kv_formats.cast_saturating(x, dtype)
                result = encoded.view(np.uint8) if dtype.itemsize == 1 else canonical_nan(encoded)
                hashes[f"{target} from {source}"] = chunk_hashes(result)
        for target, dtype in targets.items():
            codes = np.arange(256, dtype=np.uint8) if dtype.itemsize == 1 else all_codes
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
