"""Gemma 4 in GGUF files: other layouts, the tokenizer, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import gguf_gemma4
import gguf_models
import numpy as np
import pytest
import tolerance
from gguf_models import Kind
from test_gguf_models import TOKENS, float32_error, logits, make
from tiny_gguf import rewrite

from kvanta import LLM, InputError
from kvanta.checkpoint.resolve import resolve_model
from kvanta.gguf.convert import convert_gguf
from kvanta.text.tokenizer import Tokenizer

ARCHITECTURE = {"general.architecture": "gemma4"}


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))


def test_gate_and_up_in_tensors_of_their_own(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "gemma4_experts")
    expected = logits(file)
    tensors: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if "ffn_gate_up_exps" in tensor.name:
            gate, up = np.split(np.array(tensor.data), 2, axis=1)
            tensors |= {
                tensor.name: None,
                tensor.name.replace("gate_up", "gate"): np.ascontiguousarray(gate),
                tensor.name.replace("gate_up", "up"): np.ascontiguousarray(up),
            }
    assert tensors
    rewrite(file, ARCHITECTURE, tensors)
    np.testing.assert_array_equal(logits(file), expected)
    rewrite(file, ARCHITECTURE, {"blk.1.ffn_up_exps.weight": None})
    with pytest.raises(InputError, match=r"lacks the tensor for 'model\.layers\.1\.experts\.\*\.up_proj\.weight'"):
        logits(file)


def test_gate_and_up_stay_in_the_file(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "gemma4_experts", Kind.Q8_0)
    index = json.loads((resolve_model(file).path / "model.gguf.index.json").read_text())
    gate, up = (index["tensors"][f"model.layers.0.experts.*.{part}_proj.weight"] for part in ("gate", "up"))
    assert gate["stride"] == up["stride"] == 2 * (up["offset"] - gate["offset"])
    assert gate["shape"] == up["shape"] == [6, 32, 64]


@pytest.mark.parametrize("model", ["gemma4_shared_layers", "gemma4_experts"])
def test_converted_folders(model: str, tmp_path: Path) -> None:
    architecture, settings = gguf_gemma4.MODELS[model]
    source = gguf_models.make_source(tmp_path / "source", architecture, **settings)
    for values in source.tensors.values():  # exact in bf16
        values.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
    folder = convert_gguf(gguf_models.write(source, tmp_path / "m.gguf"), tmp_path / "folder")
    assert float32_error(folder, source) < tolerance.F32_LOGITS


def test_ranks_give_the_bits_of_one_process(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "gemma4_experts", Kind.Q8_0)
    expected = logits(file, threads=1)
    np.testing.assert_array_equal(logits(file, tensor_parallel_size=2, threads=1), expected)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("gemma4", {"gemma4.attention.value_length": 32}, "values of another size than its keys"),
        ("gemma4", {"gemma4.rope.dimension_count_swa": 16}, "rotates only a part of each head"),
        ("gemma4", {"gemma4.attention.sliding_window_pattern": [False] * 5}, "no layer with a window"),
        ("gemma4", {"gemma4.attention.shared_kv_layers": 5}, "5 layers, all of which share"),
        ("gemma4", {"gemma4.attention.head_count_kv": [2, 2, 2]}, "has 3 entries, not 5"),
        ("gemma4", {"gemma4.attention.head_count_kv": [2, 0, 2, 2, 2]}, r"numbers in 1\.\.2\^31-1, got 0"),
        ("gemma4", {"gemma4.rope.scaling.type": "yarn"}, "scaled rope frequencies"),
        ("gemma4", {"gemma4.attention.key_length_swa": None}, "lacks the key"),
        ("gemma4_shared_layers", {"gemma4.feed_forward_length": [96, 96, 192, 192, 192]}, r"MLPs of \[96, 192\]"),
        ("gemma4_shared_layers", {"gemma4.attention.shared_kv_layers": 1}, "MLPs of"),
        ("gemma4_k_eq_v", {"gemma4.attention.head_count_kv": [2, 2, 2, 2, 2]}, "has shape"),
        ("gemma4_experts", {"gemma4.expert_count": 5}, "has shape"),
    ],
)
def test_files_that_do_not_fit(model: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file, _ = make(tmp_path, model)
    rewrite(file, ARCHITECTURE | changes)
    with pytest.raises(InputError, match=message):
        logits(file)


@pytest.mark.parametrize(
    ("model", "tensor"),
    [
        ("gemma4", "blk.1.attn_v.weight"),
        ("gemma4_k_eq_v", "blk.0.attn_v.weight"),
        ("gemma4_k_eq_v", "blk.1.attn_k.weight"),
        ("gemma4_shared_layers", "blk.3.inp_gate.weight"),
        ("gemma4_shared_layers", "per_layer_token_embd.weight"),
        ("gemma4", "blk.2.layer_output_scale.weight"),
        ("gemma4_experts", "blk.2.ffn_down_exps.scale"),
    ],
)
def test_tensors_that_are_missing(model: str, tensor: str, tmp_path: Path) -> None:
    file, _ = make(tmp_path, model)
    rewrite(file, ARCHITECTURE, {tensor: None})
    with pytest.raises(InputError, match="lacks the tensor for"):
        logits(file)


@pytest.mark.parametrize("factors", [[1.0] * 8 + [2.0] * 24, [1e30] * 8 + [1.0] * 24, [1.0] * 8])
def test_frequency_factors_that_are_refused(factors: list[float], tmp_path: Path) -> None:
    file, _ = make(tmp_path, "gemma4")
    rewrite(file, ARCHITECTURE, {"rope_freqs.weight": np.array(factors, np.float32)})
    with pytest.raises(InputError, match=r"not ones and then huge ones, 32 in all"):
        logits(file)


def test_unused_projections_of_shared_layers_are_left_out(tmp_path: Path) -> None:
    file, source = make(tmp_path, "gemma4_shared_layers")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    more = {f"blk.4.{part}.weight": np.array(tensors[f"blk.1.{part}.weight"].data) for part in ("attn_k", "attn_v")}
    rewrite(file, ARCHITECTURE, more)
    assert float32_error(file, source) < tolerance.F32_LOGITS


def test_the_tokenizer(tmp_path: Path) -> None:
    """Merges in their order, no space before a text, a beginning whatever the file says."""
    file, _ = make(tmp_path, "gemma4")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc\n", "ab", "bc", "\u2581a", "\n\n"]
    kinds = [3, 1, 3, 3, 3, 3, 4, 1, *[6] * 256, *[1] * 9]
    count = 300 - len(tokens)
    rewrite(
        file,
        ARCHITECTURE
        | {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens + [f"<unused{index}>" for index in range(count)],
            "tokenizer.ggml.token_type": kinds + [5] * count,
            "tokenizer.ggml.merges": ["b c", "a b", "\u2581 a", "\n \n"],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": None,
            "tokenizer.ggml.add_bos_token": False,
        },
    )
    folder = resolve_model(file).path
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("abc a\n\nab\u00e9<turn|>")
    shown = [tokens[index] for index in ids]
    assert shown == ["<bos>", "a", "bc", "\u2581a", "\n\n", "ab", "<0xC3>", "<0xA9>", "<turn|>"]
    assert tokenizer.decode(ids[1:-1]) == "abc a\n\nab\u00e9"
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == [1, tokens.index("<turn|>")]
    assert LLM(file).logits(TOKENS[:4]).shape == (4, 300)
    rewrite(file, ARCHITECTURE | {"tokenizer.ggml.merges": ["a c"]})
    with pytest.raises(InputError, match="'a c' does not join two tokens"):
        resolve_model(file)
    rewrite(file, ARCHITECTURE | {"tokenizer.ggml.merges": None})
    with pytest.raises(InputError, match=r"lacks the key 'tokenizer\.ggml\.merges'"):
        resolve_model(file)
