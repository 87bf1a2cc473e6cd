"""Reader of a GGUF file's header: keys, values and the table of tensors, every count checked against the file's size.

Written for start-up time: the arrays of a vocabulary, 400,000 texts, take a quarter of a second. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvanta.errors import InputError

# GGUF value type -> numpy's; 8 is a string, 9 an array.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _ARRAY = 8, 9
_TOKENS = repr("tokenizer.ggml.tokens")
_MAX_HEADER_BYTES = 1 << 30
_MAX_COUNT = 1 << 24
_DEFAULT_ALIGNMENT = 32
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the table."""

    name: str
    shape: tuple[int, ...]
    """Outermost size first: the reverse of GGUF's order."""
    type_id: int
    """ggml's number of the type."""
    path: Path
    offset: int
    """First byte in the file."""


@dataclass(frozen=True)
class Header:
    """All that is known of a file without its tensors' data."""

    path: Path
    size: int
    values: dict[str, Any]
    tensors: list[TensorInfo]


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: bytes | mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self.end = min(len(data), _MAX_HEADER_BYTES)
        self._data = data

    def fail(self, reason: str) -> InputError:
        size = len(self._data)
        return InputError(f"{self.path} is not a usable GGUF file: {reason} at byte {self.position} of {size}")

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > self.end:
            raise self.fail(f"{what} needs {count} bytes beyond the end")
        data = self._data[self.position : end]
        self.position = end
        return data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str) -> int:
        value = self.u64(what)
        if value > _MAX_COUNT:
            raise self.fail(f"{what} is {value}, more than {_MAX_COUNT}")
        return value

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        # llama.cpp takes tokens as bytes; no text has one that is no UTF-8.
        errors = "replace" if what == _TOKENS else "strict"
        data, position, limit = self._data, self.position, self.end
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        result = []
        for _ in range(count):
            begin = position + 8
            if begin > limit:
                raise self.fail(f"{what} needs {count} texts, which go beyond the end")
            end = begin + length_at(data, position)[0]
            if end > limit:
                raise self.fail(f"{what} needs {end - begin} bytes beyond the end")
            try:
                result.append(data[begin:end].decode(errors=errors))
            except UnicodeDecodeError:
                self.position = position
                raise self.fail(f"{what} is not UTF-8") from None
            position = end
        self.position = position
        return result

    def value(self, kind: int, what: str) -> Any:
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1, what)[0]
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise self.fail(f"{what} has the unknown value type {kind}")
        item = self.u32(what)
        count = self.count(f"the length of {what}")
        if item in _SCALARS:
            return self._scalars(_SCALARS[item], count, what)
        if item == _STRING:
            return self.texts(count, what)
        raise self.fail(f"{what} is an array of unknown type {item}")

    def _scalars(self, kind: np.dtype[Any], count: int, what: str) -> list[Any]:
        return list(np.frombuffer(self.take(count * kind.itemsize, what), kind).tolist())


def _tensor(cursor: _Cursor, path: Path) -> TensorInfo:
    """An entry whose offset is still relative to the data's start."""
    name = cursor.text("a tensor's name")
    what = f"tensor {name!r}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= 4:
        raise cursor.fail(f"{what} has {dimensions} dimensions")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    if not all(0 < size < 1 << 48 for size in shape):
        raise cursor.fail(f"{what} has the shape {list(shape)}")
    return TensorInfo(name, shape, cursor.u32(what), path, cursor.u64(what))


def _read(path: Path, data: bytes | mmap.mmap) -> Header:
    cursor = _Cursor(path, data)
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise InputError(f"{path} is a Git LFS pointer, not the file itself: fetch it with `git lfs pull`")
    if data[:4] != b"GGUF":
        raise InputError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
    cursor.take(4, "the magic number")
    version = cursor.u32("the version")
    if version in (2 << 24, 3 << 24):
        raise InputError(
            f"{path} is a big-endian GGUF file: convert it (gguf-convert-endian {path.name} little), or download the "
            "little-endian one"
        )
    if version not in (2, 3):
        raise InputError(f"{path} has GGUF version {version}; known: 2, 3 (little endian)")
    tensor_count = cursor.count("the number of tensors")
    values: dict[str, Any] = {}
    for _ in range(cursor.count("the number of keys")):
        key = cursor.text("a key")
        if key in values:
            raise cursor.fail(f"the key {key!r} occurs twice")
        values[key] = cursor.value(cursor.u32(repr(key)), repr(key))
    tensors = [_tensor(cursor, path) for _ in range(tensor_count)]
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise InputError(f"{path}: key 'general.alignment' must be a number of bytes, got {str(alignment)[:60]!r}")
    start = -(-cursor.position // alignment) * alignment
    placed = [TensorInfo(t.name, t.shape, t.type_id, path, start + t.offset) for t in tensors]
    names = {tensor.name for tensor in placed}
    if len(names) != len(placed):
        raise InputError(f"{path} is not a usable GGUF file: two of its tensors have the same name")
    return Header(path, len(data), values, placed)


def read_header(path: Path) -> Header:
    """Raises InputError unless every count and text of the header fits into the file. Tensors are not checked."""
    if path.stat().st_size == 0:
        return _read(path, b"")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _read(path, data)
