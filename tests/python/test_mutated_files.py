"""Every parser of a model folder's files on mutations of good ones: what it makes of them, or one InputError."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as layouts
import test_tokenizer_files as tokenizer_files
import tiny_checkpoints
import tiny_classes
import tiny_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_layouts import layout_of, publish_config

from kvanta import InputError, ResourceError, _core
from kvanta.checkpoint.checks import check_model_folder
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.fleet.plan import plan
from kvanta.gguf.convert import index_gguf
from kvanta.text.tokenizer import Tokenizer

# Values that a reader of JSON may not expect where another one belongs.
STRANGE: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31, 2**63, 2**70, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "\x00", "a\nb", "../../etc/passwd", "é" * 300, "\ud800", [], {}, [[]], [None], {"": None}, {"a": {"b": []}}),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value, as a container and a key of it."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    found = [(value, key) for key in keys]
    return found + [place for key in keys for place in places(value[key])]


def mutate_json(draw: st.DrawFn, data: bytes) -> bytes:
    """Removes values, replaces them by strange ones, doubles them, and exchanges two."""
    root: Any = [json.loads(data)]
    for _ in range(draw(st.integers(1, 3))):
        found = places(root)
        container, key = found[draw(st.integers(0, len(found) - 1))]
        action = draw(st.sampled_from(["replace", "remove", "exchange", "wrap"]))
        if action == "replace":
            container[key] = copy.deepcopy(draw(st.sampled_from(STRANGE)))
        elif action == "remove" and container is not root:
            del container[key]
        elif action == "exchange":
            other, place = found[draw(st.integers(0, len(found) - 1))]
            other[place], container[key] = copy.deepcopy((container[key], other[place]))
        elif action == "wrap":
            container[key] = [container[key], copy.deepcopy(container[key])]
    return json.dumps(root[0] if root else None).encode()


def mutate_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Changes, removes, doubles and inserts bytes, and cuts the end off."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(result) - 1)))
        action = draw(st.sampled_from(["change", "remove", "double", "insert", "cut"]))
        size = draw(st.integers(1, 12))
        if action == "change" and result:
            result[at] = draw(st.integers(0, 255))
        elif action == "remove":
            del result[at : at + size]
        elif action == "double":
            result[at:at] = result[at : at + size]
        elif action == "insert":
            result[at:at] = draw(st.binary(min_size=size, max_size=size))
        elif action == "cut" and draw(st.booleans()):
            del result[at:]
    return bytes(result)


@st.composite
def mutations(draw: st.DrawFn, data: bytes, is_json: bool, header: int) -> bytes:
    """Changes of the first `header` bytes; those of a JSON file change its values, or its bytes."""
    if is_json and draw(st.integers(0, 3)) > 0:
        return mutate_json(draw, data)
    return mutate_bytes(draw, data[:header]) + data[header:]


@dataclass(frozen=True)
class Parser:
    """A file of a folder, and what reads it."""

    file: str
    make: Callable[[Path], object]
    """Puts the good file, and those that belong to it, into an empty folder."""
    read: Callable[[Path], object]
    header: int = 1 << 20
    examples: int = 100


def tokenizer_of(make: Callable[[Path], object], file: str) -> Parser:
    def read(folder: Path) -> None:
        tokenizer = Tokenizer(folder)
        tokenizer.decode(tokenizer.encode("Once upon a time, 12 é 漢"))

    return Parser(file, make, read)


def added_tokens(folder: Path) -> None:
    tokenizer_files.vocab_and_merges(folder)
    entries = {"400": {"content": "<|user|>", "special": True, "lstrip": False}, "401": {"content": "<|end|>"}}
    config = {"added_tokens_decoder": entries, "eos_token": "<|end|>", "add_bos_token": False, "legacy": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "added_tokens.json").write_text(json.dumps({"<|tool|>": 402}))


def tekken(folder: Path) -> None:
    listed = [{"rank": 2, "token_str": "</s>", "is_control": True}, {"rank": 1, "token_str": "<s>"}]
    file = tokenizer_files.tekken(listed, tokenizer_files.ranks())
    (folder / "tekken.json").write_text(json.dumps(file))


def sentencepiece(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tokenizer_files.sentencepiece_folder(folder, tokenizer_files.trained(kind))

    return make


def config_with(quantization: dict[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        config = tiny_checkpoints.CONFIG | {"quantization_config": quantization}
        (folder / "config.json").write_text(json.dumps(config))

    return make


def hf_quant_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(tiny_checkpoints.CONFIG))
    declared = layouts.LAYOUTS["modelopt_nvfp4"].files["hf_quant_config.json"]
    modules = {f"model.layers.{layer}.self_attn": {"quant_algo": "FP8"} for layer in range(2)}
    declared["quantization"] |= {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": modules}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared))


def shards(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(tiny_checkpoints.CONFIG))
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        (folder / name).write_bytes(b"")
    index = {"metadata": {"total_size": 8}, "weight_map": {f"t{i}": names[i % 2] for i in range(4)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def scheme_file(folder: Path) -> None:
    layers = ["int8", "k=int8,v=fp8", "bf16", "int8+exact=2", "fp8"]
    content = {"kvanta_scheme_version": 1, "model": "x", "layers": layers}
    (folder / "scheme.json").write_text(json.dumps(content))


def read_schemes(folder: Path) -> None:
    plan("stories260k", 1 << 30, [str(folder / "scheme.json")])


def stories(folder: Path) -> None:
    shutil.copyfile(SHIPPED / "stories260k/tokenizer.json", folder / "tokenizer.json")


def config_of(architecture: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        tiny_classes.make_of_class(architecture).config.save_pretrained(folder)
        if layout := layout_of(architecture):
            publish_config(folder, layout)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture], "dtype": "bfloat16"}))

    return make


def gguf_file(folder: Path) -> None:
    model = tiny_gguf.TinyModel(layers=1, head_dim=8, ffn=8)
    tiny_gguf.write_gguf(folder / "m.gguf", model, model.weights())


def read_gguf(folder: Path) -> None:
    made = folder.parent / "made"
    shutil.rmtree(made, ignore_errors=True)
    index_gguf(folder / "m.gguf", made)


def read_info(folder: Path) -> None:
    _core.read_model_info(str(folder))


CONFIGS = ("fp8_blocks", "ct_w4a16", "quark_fp8", "gptq_4_act_order", "awq", "nf4", "modelopt_fp8_blocks")
PARSERS: dict[str, Parser] = {
    "GGUF": Parser("m.gguf", gguf_file, read_gguf, header=9000, examples=60),
    "tiktoken": tokenizer_of(tokenizer_files.tiktoken_file, "tokenizer.model"),
    "tekken": tokenizer_of(tekken, "tekken.json"),
    "SentencePiece byte pairs": tokenizer_of(sentencepiece("llama"), "tokenizer.model"),
    "SentencePiece unigrams": tokenizer_of(sentencepiece("unigram"), "tokenizer.model"),
    "vocab.json": tokenizer_of(tokenizer_files.vocab_and_merges, "vocab.json"),
    "merges.txt": tokenizer_of(tokenizer_files.vocab_and_merges, "merges.txt"),
    "tokenizer_config.json": tokenizer_of(added_tokens, "tokenizer_config.json"),
    "added_tokens.json": tokenizer_of(added_tokens, "added_tokens.json"),
    **{
        f"quantization_config, {name}": Parser("config.json", config_with(layouts.LAYOUTS[name].config), read_info)
        for name in CONFIGS
    },
    "hf_quant_config.json": Parser("hf_quant_config.json", hf_quant_config, read_info),
    "safetensors index": Parser("model.safetensors.index.json", shards, check_model_folder),
    "scheme file": Parser("scheme.json", scheme_file, read_schemes),
    "tokenizer.json": tokenizer_of(stories, "tokenizer.json"),
}
CLASSES = {name: Parser("config.json", config_of(name), read_info, examples=50) for name in _core.architectures()}


@pytest.mark.parametrize(
    "name", [*PARSERS, *(pytest.param(name, marks=pytest.mark.rotation("name", 4, 0)) for name in CLASSES)]
)
def test_a_mutated_file_is_read_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = (PARSERS | CLASSES)[name]
    if name == "tiktoken":
        tokenizer_files.family(monkeypatch, tokenizer_files.GPT4_PATTERN)
    folder = tmp_path / "model"
    folder.mkdir()
    parser.make(folder)
    parser.read(folder)
    good = (folder / parser.file).read_bytes()
    is_json = parser.file.endswith(".json")
    refusals: list[str] = []

    @settings(max_examples=parser.examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(mutations(good, is_json, parser.header))
    def check(data: bytes) -> None:
        (folder / parser.file).write_bytes(data)
        try:
            parser.read(folder)
        except (InputError, ResourceError) as error:
            refusals.append(str(error))

    check()
    assert refusals, "no mutation was noticed"
    assert [text for text in refusals if not text.isprintable()] == []
