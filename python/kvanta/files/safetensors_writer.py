"""Writes a safetensors file tensor by tensor, so that a converted model never has to fit in memory; lists one's names.

Layout (https://github.com/huggingface/safetensors#format): u64 length | JSON header | tensors, back to back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError

_ITEM_BYTES = {"BF16": 2, "F32": 4}


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bfloat16 bits of float32 values, rounded to nearest even; NaN stays NaN, overflow becomes infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():  # rounding could carry a NaN's mantissa into infinity
        rounded[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return rounded


def _encode(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    return to_bf16(values) if dtype == "BF16" else np.ascontiguousarray(values, dtype=np.float32)


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[Any]]],
    dtype: str | Mapping[str, str] = "BF16",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes `tensors` (in the order of `shapes`) as `dtype`, one for all or by name: float32 as BF16 or F32.

    `metadata`: further entries of the header's __metadata__.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, shape in shapes.items():
        kind = dtype if isinstance(dtype, str) else dtype[name]
        size = int(np.prod(shape, dtype=np.int64)) * _ITEM_BYTES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts 8-byte aligned

    expected = iter(shapes.items())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, values in tensors:
            if (name, values.shape) != next(expected):
                raise AssertionError(f"tensor {name} {values.shape} is not the one announced")
            file.write(_encode(values, dtype if isinstance(dtype, str) else dtype[name]).tobytes())
        if next(expected, None) is not None:
            raise AssertionError("fewer tensors than announced")


def read_tensor_names(path: Path) -> list[str]:
    """Names of the tensors in a file, in its order. Raises InputError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 100_000_000)))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path} is not a safetensors file: its header is no JSON object")
    return [str(name) for name in header if name != "__metadata__"]
