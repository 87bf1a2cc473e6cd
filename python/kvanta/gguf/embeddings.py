"""Pooling and dense modules of a GGUF file, as the files of sentence-transformers that a folder has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.safetensors_writer import write_safetensors
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.tensor_names import DENSE

_MEAN = 1  # llama.cpp's LLAMA_POOLING_TYPE_MEAN; the last token's state is the default of folders


def write_modules(metadata: Metadata, folder: Path) -> None:
    """modules.json and its folders, for a file of means or with dense modules. Raises InputError."""
    dense = [name for name in DENSE if name in metadata.tensors]
    is_mean = metadata.value(f"{metadata.architecture}.pooling_type") == _MEAN
    if not is_mean and not dense:
        return
    modules = [("", "Transformer")]
    if is_mean:
        modules.append(("1_Pooling", "Pooling"))
        _write_config(folder / "1_Pooling", {"pooling_mode_mean_tokens": True})
    for name in dense:
        path = f"{name.removeprefix('dense_').removesuffix('.weight')}_Dense"
        modules.append((path, "Dense"))
        _write_dense(metadata, name, folder / path)
    modules.append(("4_Normalize", "Normalize"))
    text = json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
    (folder / "modules.json").write_text(text, encoding="utf-8")


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write_dense(metadata: Metadata, name: str, folder: Path) -> None:
    info = metadata.tensors[name]
    if len(info.shape) != 2:
        raise InputError(f"{metadata.path}: tensor {name!r} has shape {info.shape}; a dense module has a matrix")
    rows, columns = info.shape
    identity = "torch.nn.modules.linear.Identity"
    config = {"in_features": columns, "out_features": rows, "bias": False, "activation_function": identity}
    _write_config(folder, config)
    values = metadata.values(info).reshape(info.shape)
    write_safetensors(folder / "model.safetensors", {"linear.weight": info.shape}, [("linear.weight", values)], "F32")
