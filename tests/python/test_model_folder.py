"""Folders that look like models and are none: one line names the cause and the remedy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvanta import LLM, InputError
from kvanta.checkpoint.checks import check_model_folder
from kvanta.checkpoint.resolve import SHIPPED, resolve_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1\n"
LLAMA = json.dumps({"model_type": "llama"})
INDEX = json.dumps({"weight_map": {f"t{n}": f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)}})
SHARD = "model-00002-of-00003.safetensors"

BAD: dict[str, tuple[Mapping[str, str], str]] = {
    "nothing": ({}, r"no config\.json: give a folder"),
    "an adapter": (
        {"adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"}), "adapter_model.safetensors": ""},
        "is an adapter of 'org/base' without the model's own weights: merge it",
    ),
    "an adapter with a config": (
        {"config.json": LLAMA, "adapter_config.json": "{}", "adapter_model.safetensors": ""},
        "is an adapter without",
    ),
    "diffusers": ({"model_index.json": '{"_class_name": "FluxPipeline"}'}, r"pipeline of diffusers \('FluxPipeline'\)"),
    "GGUF files": ({"a-q4.gguf": "", "b.gguf": ""}, r"give one of them, such as .*a-q4\.gguf$"),
    "the maker's layout": ({"params.json": "{}", "consolidated.safetensors": ""}, r"own layout \(params\.json\)"),
    "a pointer as config": ({"config.json": POINTER}, r"config\.json is a Git LFS pointer.*git lfs pull in"),
    "a pointer as weights": (
        {"config.json": LLAMA, "model.safetensors": POINTER},
        r"model\.safetensors is a Git LFS pointer, not the file itself: run git lfs pull in",
    ),
    "MLX": (
        {"config.json": '{"quantization": {"group_size": 64, "bits": 4}}', "model.safetensors": ""},
        "quantized by MLX, 4 bits in groups of 64, which is not supported: give the unquantized checkpoint",
    ),
    "PyTorch": ({"config.json": LLAMA, "pytorch_model.bin": ""}, r"as pytorch_model\.bin, and only \*\.safetensors"),
    "ONNX": ({"config.json": LLAMA, "model.onnx": ""}, r"as model\.onnx"),
    "shards of an index": (
        {"config.json": LLAMA, "model.safetensors.index.json": INDEX, "model-00002-of-00006.safetensors": ""},
        r"lacks 5 of the 6 files of weights that model\.safetensors\.index\.json names: "
        r"model-00001-of-00006\.safetensors.* and 2 more; download them again",
    ),
    "shards by number": (
        {"config.json": LLAMA, SHARD: ""},
        "lacks 2 of the 3 files of weights that their numbers show: model-00001-of-00003.safetensors, model-00003",
    ),
}


@pytest.mark.parametrize(("files", "message"), BAD.values(), ids=BAD.keys())
def test_a_folder_that_is_no_model(files: Mapping[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        LLM(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_pipe_in_place_of_weights_delays_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors is not a regular file"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_files_without_end_are_not_read(name: str, tmp_path: Path) -> None:
    """Sparse: 1 TB of zeros."""
    for file in (SHIPPED / "stories260k").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with (tmp_path / name).open("wb") as endless:
        endless.truncate(10**12)
    with pytest.raises(InputError, match=re.escape(name) + ".*at most .* are read"):
        LLM(tmp_path)


def test_a_template_without_end_is_not_compiled(tmp_path: Path) -> None:
    for file in (SHIPPED / "stories260k").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * (2 << 20)}))
    with pytest.raises(InputError, match="chat template has 2,097,152 characters, and at most 1,048,576 are read"):
        LLM(tmp_path)


def test_a_model_is_one() -> None:
    check_model_folder(SHIPPED / "stories260k")


def test_a_pointer_as_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text(POINTER)
    with pytest.raises(InputError, match=r"model\.gguf is a Git LFS pointer"):
        resolve_model(tmp_path / "model.gguf")


def test_a_pointer_as_tokenizer(tmp_path: Path) -> None:
    for file in (SHIPPED / "stories260k").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer.json").write_text(POINTER)
    with pytest.raises(InputError, match=r"tokenizer\.json is a Git LFS pointer"):
        LLM(tmp_path)
