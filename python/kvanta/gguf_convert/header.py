"""Checks a GGUF file's header against its size before the `gguf` package reads it.

That package trusts the counts in the file: a lying array length makes it loop for hours or fill the memory.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import struct
from pathlib import Path

from kvanta.errors import InputError

# GGUF value type -> bytes of one value; 8 is a string, 9 an array.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_HEADER_BYTES = 1 << 30
_MAX_COUNT = 1 << 24


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.position = 0
        self._file = path.open("rb")

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fail(self, reason: str) -> InputError:
        return InputError(f"{self.path} is not a usable GGUF file: {reason} at byte {self.position} of {self.size}")

    def take(self, count: int, what: str) -> bytes:
        if self.position + count > min(self.size, _MAX_HEADER_BYTES):
            raise self.fail(f"{what} needs {count} bytes beyond the end")
        data = self._file.read(count)
        self.position += count
        return data

    def skip(self, count: int, what: str) -> None:
        if self.position + count > min(self.size, _MAX_HEADER_BYTES):
            raise self.fail(f"{what} needs {count} bytes beyond the end")
        self._file.seek(count, 1)
        self.position += count

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack("<Q", self.take(8, what))[0])

    def count(self, what: str) -> int:
        value = self.u64(what)
        if value > _MAX_COUNT:
            raise self.fail(f"{what} is {value}, more than {_MAX_COUNT}")
        return value

    def text(self, what: str) -> str:
        data = self.take(self.u64(what), what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None


def _skip_value(cursor: _Cursor, kind: int, key: str) -> None:
    if kind in _SCALAR_BYTES:
        cursor.skip(_SCALAR_BYTES[kind], key)
    elif kind == _STRING:
        cursor.text(key)
    elif kind == _ARRAY:
        item = cursor.u32(key)
        count = cursor.count(f"the length of {key}")
        if item in _SCALAR_BYTES:
            cursor.skip(count * _SCALAR_BYTES[item], key)
        elif item == _STRING:
            for _ in range(count):
                cursor.text(key)
        else:
            raise cursor.fail(f"{key} is an array of unknown type {item}")
    else:
        raise cursor.fail(f"{key} has the unknown value type {kind}")


def check_header(path: Path) -> None:
    """Raises InputError unless every count, string and tensor shape of the header fits into the file."""
    with _Cursor(path) as cursor:
        if cursor.take(4, "the magic number") != b"GGUF":
            raise InputError(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        version = cursor.u32("the version")
        if version not in (2, 3):
            raise InputError(f"{path} has GGUF version {version}; known: 2, 3 (little endian)")
        tensors = cursor.count("the number of tensors")
        for _ in range(cursor.count("the number of keys")):
            key = cursor.text("a key")
            _skip_value(cursor, cursor.u32(key), repr(key))
        for _ in range(tensors):
            name = repr(cursor.text("a tensor's name"))
            dimensions = cursor.u32(name)
            if not 1 <= dimensions <= 4:
                raise cursor.fail(f"tensor {name} has {dimensions} dimensions")
            elements = 1
            for _ in range(dimensions):
                elements *= cursor.u64(name)
            cursor.u32(name)  # its type; the gguf package checks it
            offset = cursor.u64(name)
            # The densest type has less than 1.6 bits per element; the exact size is checked when it is read.
            if elements == 0 or elements // 8 > cursor.size or offset > cursor.size:
                raise cursor.fail(f"tensor {name} with {elements} elements at {offset} lies beyond the end")
