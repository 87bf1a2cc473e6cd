"""Typed access to the metadata of a GGUF file, and to the bytes of its tensors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError
from kvanta.gguf.files import read_parts
from kvanta.gguf.header import TensorInfo
from kvanta.gguf.other_converters import translate

# general.type of files that are no model.
_NO_MODELS = {
    "adapter": "a LoRA adapter, which is not applied here: merge it into the model, and give the merged file",
    "mmproj": "a vision projector (mmproj), which belongs to a model: give the model's own file, for prompts of text",
    "imatrix": "an importance matrix, with which llama.cpp quantizes a model: give the model's own file",
}


def type_name(tensor: TensorInfo) -> str:
    """The tensor's type: "F32", "Q4_K". Its number must be known."""
    return str(gguf.GGMLQuantizationType(tensor.type_id).name)


def tensor_bytes(tensor: TensorInfo) -> int:
    """Bytes of the tensor by its shape and type."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    return math.prod(tensor.shape) // weights * size


class Metadata:
    """The key-value part of a GGUF file. Keys of the architecture are given without its name: "block_count"."""

    def __init__(self, path: Path) -> None:
        headers = read_parts(path)
        self.path = path
        self.files = [header.path for header in headers]
        self._values = headers[0].values
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers:
            for tensor in header.tensors:
                self._check_extent(tensor, header.size)
                self.tensors[tensor.name] = tensor
        self._check_kind()
        translate(self._values, self.tensors)
        self._maps: dict[Path, NDArray[np.uint8]] = {}
        self.architecture = self.text("general.architecture")

    def _check_kind(self) -> None:
        """Refuses files that belong to a model and are none."""
        kind, architecture = self._values.get("general.type"), self._values.get("general.architecture")
        what = _NO_MODELS.get(kind if isinstance(kind, str) else "")
        if what is None and architecture == "clip":
            what = _NO_MODELS["mmproj"]
        if what is not None:
            raise InputError(f"{self.path} is {what}")

    @staticmethod
    def _check_extent(tensor: TensorInfo, file_size: int) -> None:
        try:
            weights, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
        except ValueError:
            raise InputError(f"{tensor.path}: tensor {tensor.name!r} has the unknown type {tensor.type_id}") from None
        if tensor.shape[-1] % weights != 0:
            raise InputError(
                f"{tensor.path}: tensor {tensor.name!r} has rows of {tensor.shape[-1]}, not whole blocks of {weights}"
            )
        size = tensor_bytes(tensor)
        if tensor.offset + size > file_size:
            raise InputError(
                f"{tensor.path} is not a usable GGUF file: its {file_size} bytes do not hold what its header says: "
                f"{size} bytes of tensor {tensor.name!r} at {tensor.offset}"
            )

    def data(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes in the mapped file: [rows][bytes of a row]."""
        if tensor.path not in self._maps:
            self._maps[tensor.path] = np.memmap(tensor.path, dtype=np.uint8, mode="r")
        end = tensor.offset + tensor_bytes(tensor)
        return self._maps[tensor.path][tensor.offset : end].reshape(math.prod(tensor.shape[:-1]), -1)

    def values(self, tensor: TensorInfo, rows: slice = slice(None)) -> NDArray[np.float32]:
        """Dequantized rows, [rows][last size of the shape]. Raises InputError for a type without a definition."""
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        data = np.ascontiguousarray(self.data(tensor)[rows])
        try:
            with np.errstate(all="ignore"):  # the caller judges values that are not finite
                values = gguf.dequantize(data, kind)
        except NotImplementedError:
            raise InputError(
                f"{self.path}: tensor {tensor.name!r} is {kind.name}, which cannot be dequantized"
            ) from None
        return np.asarray(values, dtype=np.float32).reshape(len(data), tensor.shape[-1])

    def value(self, key: str) -> Any:
        """The value, unconverted; None without one."""
        return self._values.get(key)

    def _typed(self, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise InputError(f"{self.path} lacks the key {key!r}, which is needed")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"{self.path}: key {key!r} must be {what}, got {str(value)[:60]!r}")
        return value

    def text(self, key: str, default: Any = None) -> str:
        return str(self._typed(key, (str,), "a text", _REQUIRED if default is None else default))

    def named_texts(self, prefix: str) -> dict[str, str]:
        """Texts of the keys that begin with `prefix`, by the rest of the key."""
        found = {key: value for key, value in self._values.items() if key.startswith(prefix)}
        return {key[len(prefix) :]: value for key, value in found.items() if isinstance(value, str)}

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
        """A positive whole number under the architecture's name, or a list of the same one for every layer."""
        key = f"{self.architecture}.{name}"
        listed = self._values.get(key)
        if isinstance(listed, list) and len(set(map(repr, listed))) == 1 and type(listed[0]) is int:
            value = listed[0]
        else:
            value = int(self._typed(key, (int,), "a whole number", _REQUIRED if default is None else default))
        if not 0 < value < 1 << 31:
            raise InputError(f"{self.path}: key {key!r} must be in 1..2^31-1, got {value}")
        return value

    def sizes(self, name: str, count: int) -> list[int]:
        """A positive whole number for each of `count` layers: a list, or one for all of them."""
        key = f"{self.architecture}.{name}"
        if not isinstance(self._values.get(key), list):
            return [self.size(name)] * count
        sizes: list[int] = self.array(key, int, count)
        for size in sizes:
            if isinstance(size, bool) or not 0 < size < 1 << 31:
                raise InputError(f"{self.path}: key {key!r} must list numbers in 1..2^31-1, got {size}")
        return sizes

    def count(self, name: str) -> int:
        """A whole number under the architecture's name; 0 without one."""
        return self.size(name) if self.value(f"{self.architecture}.{name}") not in (None, 0) else 0

    def number(self, name: str, default: float | None = None) -> float:
        key = f"{self.architecture}.{name}"
        value = float(self._typed(key, (int, float), "a number", _REQUIRED if default is None else default))
        if not 0 < value < float("inf"):
            raise InputError(f"{self.path}: key {key!r} must be a positive number, got {value}")
        return value

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self._values


_REQUIRED = object()
