"""A GGUF file becomes a folder in Hugging Face layout, whole or not at all: used in place, or converted.

`index_gguf` writes config, tokenizer and the places of the tensors in the file (model.gguf.index.json, which the engine
reads). `convert_gguf` writes the weights, too, in bfloat16, for other programs or to be changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.files.safetensors_writer import write_safetensors
from kvanta.files.working_folder import working_folder
from kvanta.gguf.config import hugging_face_config
from kvanta.gguf.embeddings import write_modules
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.vocabulary import Vocabulary
from kvanta.gguf.weights import Weights
from kvanta.text.chat_template_files import DEFAULT, FOLDER, TOOL_USE
from kvanta.text.tokenizer import Tokenizer

INDEX_FILE = "model.gguf.index.json"
CONVERTED_FILE = "converted.safetensors"


def _write_json(path: Path, value: object, indent: int | None = 1) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_texts(metadata: Metadata, folder: Path) -> tuple[Weights, list[str]]:
    """All but the weights; returns these, and the names of those that the model has."""
    vocabulary = Vocabulary(metadata)
    config = hugging_face_config(metadata, len(vocabulary.tokens))
    weights = Weights(metadata, config)
    tied = weights.tied()
    config["tie_word_embeddings"] = tied
    has_bias = "model.layers.0.self_attn.q_proj.bias" in weights
    config.setdefault("attention_bias", has_bias and metadata.architecture not in ("qwen2", "qwen2moe", "qwen2vl"))
    config.setdefault("mlp_bias", "model.layers.0.mlp.down_proj.bias" in weights)
    config.update(vocabulary.special_ids())

    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {**vocabulary.special_ids(), **_sampling(metadata)})
    _write_json(folder / "tokenizer.json", vocabulary.tokenizer, indent=None)
    _write_json(folder / "tokenizer_config.json", vocabulary.tokenizer_config())
    _write_templates(metadata, folder)
    write_modules(metadata, folder)
    return weights, [name for name in weights.weights if not (tied and name == "lm_head.weight")]


# Defaults of requests that the file's maker recommends, under transformers' names.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def _sampling(metadata: Metadata) -> dict[str, float]:
    values = {name: metadata.value(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    # Stored as f32: 0.699999988 means 0.7.
    return {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in numbers.items()}


def _write_templates(metadata: Metadata, folder: Path) -> None:
    """The template of all chats, and the one of chats with tools."""
    named = metadata.named_texts("tokenizer.chat_template.")
    default = metadata.optional_text("tokenizer.chat_template")
    default = named.get(DEFAULT) if default is None else default
    if default is not None:
        (folder / "chat_template.jinja").write_text(default, encoding="utf-8")
    if TOOL_USE in named:
        (folder / FOLDER).mkdir()
        (folder / FOLDER / f"{TOOL_USE}.jinja").write_text(named[TOOL_USE], encoding="utf-8")


def _write_converted(metadata: Metadata, folder: Path) -> None:
    weights, names = _write_texts(metadata, folder)
    write_safetensors(folder / "model.safetensors", weights.shapes(names), weights.values(names))


def _write_index(metadata: Metadata, folder: Path) -> None:
    weights, names = _write_texts(metadata, folder)
    types = set(_core.gguf_types())
    tensors: dict[str, Any] = {}
    others = []
    for name in names:
        weight = weights.weights[name]
        if not weight.in_place(types):
            others.append(name)
            continue
        tensors[name] = {"file": metadata.files.index(weight.info.path), **weight.entry()}
    files = [(path.resolve(), path.stat()) for path in metadata.files]
    index: dict[str, Any] = {
        "files": [
            {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns} for path, status in files
        ],
        "tensors": tensors,
    }
    if others or weights.from_keys:
        index["converted"] = CONVERTED_FILE
        shapes = weights.shapes(others)
        # Vectors are few, and read as f32 in any case.
        types_of = {name: "F32" if len(shape) < 2 else "BF16" for name, shape in shapes.items()}
        write_safetensors(folder / CONVERTED_FILE, shapes, weights.values(others), types_of)
    _write_json(folder / INDEX_FILE, index)


def _check_folder(source: Path, folder: Path) -> None:
    """Opens what was written, so that nothing is kept that the engine or the tokenizer refuses."""
    try:
        _core.read_model_info(str(folder))
        Tokenizer(folder)
    except InputError as error:
        reason = str(error).replace(f"{folder}/", "")
        raise InputError(f"{source} makes no usable model: {reason}") from None


def _make_folder(source: Path, folder: Path, write: Callable[[Metadata, Path], None]) -> Path:
    if not source.is_file():
        raise InputError(f"there is no GGUF file {str(source)!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(folder)!r} exists already and is not an empty folder")
    metadata = Metadata(source)
    with working_folder(folder) as work:
        try:
            write(metadata, work)
            _check_folder(source, work)
            work.chmod(0o755)
            try:
                work.rename(folder)
            except OSError:
                if not (folder / "config.json").is_file():
                    raise
        except OSError as error:
            raise ResourceError(f"cannot write {str(folder)!r}: {reason_of(error)}") from None
    return folder


def convert_gguf(source: str | Path, folder: str | Path) -> Path:
    """Converts the GGUF file `source`, or the split file that it is a part of, to the new folder `folder`; returns it.

    The folder appears complete or not at all; one that two processes make at once is made by the faster.
    Raises InputError for a file that is damaged, hostile or of an unknown kind, or when `folder` has files already.
    """
    return _make_folder(Path(source).expanduser(), Path(folder).expanduser(), _write_converted)


def index_gguf(source: str | Path, folder: str | Path) -> Path:
    """Makes the folder of a model whose weights stay in the GGUF file `source`; else like convert_gguf.

    Tensors of types that the engine does not read, and those that are stored otherwise than Hugging Face does, are
    written to the folder.
    """
    return _make_folder(Path(source).expanduser(), Path(folder).expanduser(), _write_index)
