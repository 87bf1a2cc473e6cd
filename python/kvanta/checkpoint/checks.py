"""Folders that are no model for this engine, although they look like one: each is refused by its cause."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.text.tokenizer_files.files import check_not_a_pointer, read_json

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
# Suffixes of weights in other formats.
_OTHER_WEIGHTS = (".bin", ".pth", ".pt", ".onnx", ".msgpack", ".h5", ".ckpt", ".nemo")
OWN_WEIGHTS = "gguf_blocks.kvanta"
"""Weights that `kvanta convert` keeps in a GGUF file's own types."""
_MAX_NAMES = 3
_MAX_NAME_BYTES = 255


def check_model_folder(folder: Path) -> None:
    """Raises InputError, on one line, with the cause and the remedy. Weights are checked when they are read."""
    config_file = folder / "config.json"
    if config_file.is_file():
        check_not_a_pointer(config_file)
        _check_config(folder, read_json(config_file))
    else:
        _check_other_folders(folder)
        models = sorted(file.parent for file in folder.glob("*/config.json"))
        such = f", such as {models[0]}" if models else ""
        raise InputError(
            f"{folder} has no config.json: give a folder in Hugging Face layout, with config.json and *.safetensors, "
            f"or a .gguf file{such}"
        )
    _check_weights(folder)


def _check_other_folders(folder: Path) -> None:
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        of = f" of {one_line(base)}" if base else ""
        raise InputError(
            f"{folder} is an adapter{of} without the model's own weights: merge it into the model (peft's "
            "merge_and_unload) and give the folder of the merged model"
        )
    if (folder / "model_index.json").is_file():
        kind = read_json(folder / "model_index.json").get("_class_name")
        raise InputError(
            f"{folder} is a pipeline of diffusers ({one_line(kind)}): only models that generate text are supported"
        )
    if (models := sorted(each.name for each in folder.glob("models--*"))) or (folder / "refs" / "main").is_file():
        within = (
            f": give one of its models, such as {folder / models[0]}" if models else ", and its snapshot is missing"
        )
        raise InputError(f"{folder} is the hub's cache{within}")
    files = sorted(folder.glob("*.gguf"))
    if files:
        raise InputError(f"{folder} is a folder of GGUF files: give one of them, such as {files[0]}")
    if (folder / "params.json").is_file():
        raise InputError(
            f"{folder} has weights in their maker's own layout (params.json): give the folder of the same model in "
            "Hugging Face layout, with config.json"
        )


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization")
    if isinstance(quantization, Mapping) and {"group_size", "bits"} <= quantization.keys():
        bits, group = one_line(quantization["bits"]), one_line(quantization["group_size"])
        raise InputError(
            f"{folder} is quantized by MLX, {bits} bits in groups of {group}, which is not supported: give the "
            "unquantized checkpoint, a GGUF file, or one of the methods that docs/weights.md lists"
        )


def _check_weights(folder: Path) -> None:
    if (folder / OWN_WEIGHTS).is_file():
        return
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        check_not_a_pointer(file)
    if (folder / "model.safetensors").is_file():
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_shards(folder, sorted(_shards_of(index)), f"{index.name} names")
        return
    shards = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    if shards:
        stem, count = shards[0]["stem"], int(shards[0]["count"])
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, min(count, 9999) + 1)]
        _check_shards(folder, names, "their numbers show")
    if not any(not file.name.startswith(("adapter_", "consolidated")) for file in files):
        _check_other_weights(folder)


def _shards_of(index: Path) -> set[str]:
    """The files that an index names. Raises InputError for a name that no file can have; other malformed entries are
    left to the reader of the weights.
    """
    weights = read_json(index).get("weight_map")
    names = {name for name in weights.values() if isinstance(name, str)} if isinstance(weights, Mapping) else set()
    for name in sorted(names):
        if not name.isprintable() or not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise InputError(f"{index}: weight_map names the file {one_line(name)}, which no file can be called")
    return names


def _check_shards(folder: Path, names: list[str], source: str) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - _MAX_NAMES} more" if len(missing) > _MAX_NAMES else ""
        raise InputError(
            f"{folder} lacks {len(missing)} of the {len(names)} files of weights that {source}: "
            f"{', '.join(missing[:_MAX_NAMES])}{more}; download them again"
        )


def _check_other_weights(folder: Path) -> None:
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        raise InputError(f"{folder} has its weights in GGUF files: give one of them, such as {gguf[0]}")
    if any(folder.glob("consolidated*.safetensors")):
        raise InputError(
            f"{folder} has its weights in their maker's own layout alone (consolidated.safetensors): download "
            "model*.safetensors of the same model, too"
        )
    others = sorted(file.name for file in folder.iterdir() if file.suffix.lower() in _OTHER_WEIGHTS)
    if others:
        raise InputError(
            f"{folder} has weights as {others[0]}, and only *.safetensors are read, because other formats may run "
            "code: save the model again by transformers' save_pretrained, or give a GGUF file of it"
        )
    if (folder / "adapter_config.json").is_file():
        _check_other_folders(folder)
