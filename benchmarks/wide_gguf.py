"""GGUF files as copies of others: a model in sizes that are multiples of 256, and the weights of a file in bf16.

Blocks of 256 weights need rows of that many. A Llama model of other sizes computes the same with zeros in between: zero
channels, whose part in the mean of RMSNorm its weights and epsilon make up for, and zero heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from kvanta.files.safetensors_writer import to_bf16

Floats = NDArray[np.float32]
_BLOCK = 256


def rewrite(source: Path, target: Path, change: Callable[[str, Floats], Floats], fields: Mapping[str, Any]) -> None:
    """Writes a copy with changed tensors, the matrices in bf16 and the vectors in f32, and other values of `fields`."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=False)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value = fields.get(name, field.contents())
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = change(tensor.name, np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32))
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, to_bf16(values).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_bf16(source: Path, target: Path) -> None:
    """Writes the file with its matrices dequantized, rounded to bf16."""
    rewrite(source, target, lambda _, values: values, {})


def _spread(values: Floats, axis: int, real: int) -> Floats:
    """Zeros after every `real` entries, up to a multiple of a block."""
    moved = np.moveaxis(values, axis, 0)
    wide = np.zeros((moved.shape[0] // real, _BLOCK, *moved.shape[1:]), np.float32)
    wide[:, :real] = moved.reshape(wide.shape[0], real, *moved.shape[1:])
    return np.ascontiguousarray(np.moveaxis(wide.reshape(-1, *moved.shape[1:]), 0, axis))


def write_wide(source: Path, target: Path) -> None:
    """Writes a Llama model of 3/4 the width, such as SmolLM2-135M (576 channels, 9 heads of 64), in multiples of 256.

    Every 192 channels get 64 zeros, and every group of 3 query heads a fourth one. Raises SystemExit for other sizes.
    """
    fields = gguf.GGUFReader(source).fields
    names = {
        name: f"llama.{name}" for name in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    } | {"eps": "llama.attention.layer_norm_rms_epsilon"}
    if any(name not in fields for name in names.values()):
        raise SystemExit(f"error: {source} is no Llama model")
    hidden, heads, kv_heads, eps = (fields[name].contents() for name in names.values())
    if hidden % 192 or hidden != 64 * heads or heads != 3 * kv_heads:
        raise SystemExit(f"error: {source} has {hidden} channels, {heads} heads and {kv_heads} of K; 576, 9, 3 work")
    ratio = np.float32(0.75)

    def change(name: str, values: Floats) -> Floats:
        part = re.sub(r"^blk\.\d+\.", "", name)
        if values.ndim == 1:
            return _spread(values * np.sqrt(ratio), 0, 192)
        if part in ("attn_output.weight", "ffn_down.weight"):  # out of the heads or the MLP, into the channels
            values = _spread(values, 0, 192)
            return _spread(values, 1, 192) if part == "attn_output.weight" else values
        values = _spread(values, 1, 192)
        return _spread(values, 0, 192) if part == "attn_q.weight" else values

    changed = {names["embedding_length"]: hidden * 4 // 3, names["attention.head_count"]: heads * 4 // 3}
    rewrite(source, target, change, changed | {names["eps"]: eps * float(ratio)})
