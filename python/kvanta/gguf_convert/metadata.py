"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf

from kvanta.errors import InputError
from kvanta.gguf_convert.header import check_header


class Metadata:
    """The key-value part of a GGUF file. Keys of the architecture are given without its name: "block_count"."""

    def __init__(self, path: Path) -> None:
        check_header(path)
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception:  # the package raises whatever comes, numpy's texts too; all of it means a bad file
            size = path.stat().st_size
            raise InputError(
                f"{path} is not a usable GGUF file: its {size} bytes do not hold what its header says"
            ) from None
        self.architecture = self.text("general.architecture")

    def _value(self, key: str) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            return None
        try:
            return field.contents()
        except Exception as error:
            raise InputError(f"{self.path}: key {key!r} cannot be read: {error}") from None

    def _typed(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self._value(key)
        if value is None:
            if default is _REQUIRED:
                raise InputError(f"{self.path} lacks the key {key!r}, which is needed")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"{self.path}: key {key!r} must be {what}, got {str(value)[:60]!r}")
        return value

    def text(self, key: str, default: Any = None) -> str:
        return str(self._typed(key, (str,), "a text", _REQUIRED if default is None else default))

    def optional_text(self, key: str) -> str | None:
        value = self._typed(key, (str,), "a text", None)
        return None if value is None else str(value)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, (bool,), "true or false", default))

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        """A list of `kind`, of `length` entries if given."""
        values = self._typed(key, (list,), "a list", _REQUIRED)
        if not all(isinstance(value, kind) for value in values):
            raise InputError(f"{self.path}: key {key!r} is not a list of {kind.__name__}")
        if kind is float and not all(map(math.isfinite, values)):
            raise InputError(f"{self.path}: key {key!r} has values that are not finite")
        if length is not None and len(values) != length:
            raise InputError(f"{self.path}: key {key!r} has {len(values)} entries, not {length}")
        return list(values)

    def token_id(self, key: str, vocabulary: int) -> int | None:
        """A token id, None if absent or -1 (written as 2^32 - 1 by some tools)."""
        value = self._typed(key, (int,), "a token id", None)
        if value is None or value in (-1, 0xFFFFFFFF):
            return None
        if not 0 <= value < vocabulary:
            raise InputError(f"{self.path}: key {key!r} is {value}, outside the vocabulary of {vocabulary} tokens")
        return int(value)

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number under the architecture's name."""
        key = f"{self.architecture}.{name}"
        value = int(self._typed(key, (int,), "a whole number", _REQUIRED if default is None else default))
        if not 0 < value < 1 << 31:
            raise InputError(f"{self.path}: key {key!r} must be in 1..2^31-1, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        key = f"{self.architecture}.{name}"
        value = float(self._typed(key, (int, float), "a number", _REQUIRED if default is None else default))
        if not 0 < value < float("inf"):
            raise InputError(f"{self.path}: key {key!r} must be a positive number, got {value}")
        return value

    def has(self, name: str) -> bool:
        return self.reader.get_field(f"{self.architecture}.{name}") is not None


_REQUIRED = object()
