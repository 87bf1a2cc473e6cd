"""GGUF files as Ollama, old and new converters write them: the logits and tokens of llama.cpp's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from test_gguf_defaults import BYTE, CONTROL, LLAMA2, NORMAL, UNKNOWN, config, metadata, vocabulary
from test_gguf_models import logits, make
from tiny_gguf import TinyModel, byte_vocabulary, rewrite, write_gguf

from kvanta import LLM, InputError
from kvanta.checkpoint.facts import model_facts
from kvanta.checkpoint.generation_config import AUTO, default_sampling
from kvanta.checkpoint.resolve import resolve_model
from kvanta.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path / "home"))


def tiny(path: Path, **extra: Any) -> Path:
    return write_gguf(path, TinyModel(extra=extra), TinyModel().weights())


# Tokenizers


def test_llama_3_without_a_pre_tokenizer_is_cut_as_llama_3(tmp_path: Path) -> None:
    texts = {"<|start_header_id|>": CONTROL, "<|eot_id|>": CONTROL, "ab": NORMAL}
    found = vocabulary(tmp_path, "gpt2", texts, pre=None)
    assert found.tokenizer == vocabulary(tmp_path, "gpt2", texts, pre="llama-bpe").tokenizer
    assert found.warnings == []


@pytest.mark.parametrize("pre", [None, "default"])
def test_other_files_without_a_pre_tokenizer_are_warned_of(pre: str | None, tmp_path: Path) -> None:
    texts = {"<|endoftext|>": CONTROL, "ab": NORMAL}
    found = vocabulary(tmp_path, "gpt2", texts, pre=pre)
    assert found.tokenizer == vocabulary(tmp_path, "gpt2", texts).tokenizer
    assert "names no pre-tokenizer" in found.warnings[0]
    (tmp_path / "tokenizer.json").write_text(json.dumps(found.tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found.tokenizer_config()))
    assert Tokenizer(tmp_path).warnings == found.warnings


def test_of_equal_tokens_texts_are_cut_into_the_last_one(tmp_path: Path) -> None:
    """google/gemma-4-*-qat-q4_0-gguf; llama.cpp's table of tokens has the last one."""
    file = tiny(tmp_path / "m.gguf")
    tokens = byte_vocabulary(300)[0]
    tokens[270] = tokens[265]
    rewrite(file, {"tokenizer.ggml.tokens": tokens})
    tokenizer = Tokenizer(resolve_model(file).path)
    assert tokenizer.token_id(tokens[265]) == 270
    assert tokenizer.encode(tokens[265], add_special_tokens=False)[-1] == 270


def test_a_token_that_is_no_utf8(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    data = file.read_bytes()
    letter = byte_vocabulary(300)[0][299].encode()
    place = data.index(len(letter).to_bytes(8, "little") + letter) + 8
    file.write_bytes(data[:place] + b"\xff" * len(letter) + data[place + len(letter) :])
    assert "\ufffd" in Tokenizer(resolve_model(file).path).token_text(299)


def test_no_types_and_no_scores(tmp_path: Path) -> None:
    texts = {**LLAMA2, "<0x41>": BYTE}
    found = vocabulary(tmp_path, "llama", texts, token_type=None, scores=None)
    assert found.types[:5] == [CONTROL, CONTROL, CONTROL, BYTE, NORMAL]
    assert "no scores" in found.warnings[0]
    assert vocabulary(tmp_path, "llama", texts).types[0] == UNKNOWN


def test_a_word_that_is_named_for_padding_stays_one(tmp_path: Path) -> None:
    found = vocabulary(tmp_path, "llama", LLAMA2, padding_token_id=4)
    assert found.padding == 4
    assert "pad_token" not in found.tokenizer_config()


def test_the_list_of_tokens_counts(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf", vocab_size=1234)
    assert LLM(file, max_model_len=64, kv_cache_memory_bytes="8MiB").model_info.vocab == 300


def test_the_template_of_chats_with_tools(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    rewrite(file, {**templates, "tokenizer.chat_templates": ["tool_use"]})
    tokenizer = Tokenizer(resolve_model(file).path)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat) == "plain"
    assert tokenizer.apply_chat_template(chat, tools=[{"type": "function", "function": {"name": "f"}}]) == "tools"
    facts = {fact.name: fact.source for fact in model_facts(resolve_model(file).path).facts}
    assert facts["tool template"] == "additional_chat_templates/tool_use.jinja"


# Keys


def test_ropes_of_ollamas_gemma3(tmp_path: Path) -> None:
    keys = {"rope__global__freq_base": 2e6, "rope__local__freq_base": 2e4, "attention__key_length": 16}
    found = config(tmp_path, "gemma3", **keys, attention__layer_norm_rms_epsilon=None)
    assert (found["rope_theta"], found["rope_local_base_freq"], found["rms_norm_eps"]) == (2e6, 2e4, 1e-6)
    assert found["rope_scaling"] is None
    long = config(tmp_path, "gemma3", attention__layer_norm_rms_epsilon=None, context_length=131_072)
    assert (long["rope_theta"], long["rope_local_base_freq"]) == (1e6, 1e4)
    assert long["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_llama_cpps_gemma3_is_as_it_says(tmp_path: Path) -> None:
    found = config(tmp_path, "gemma3", context_length=131_072, rope__freq_base=1e6)
    assert found["rope_scaling"] is None


@pytest.mark.parametrize(("name", "own"), [("gptoss", "gpt-oss"), ("olmo3", "olmo2")])
def test_ollamas_names_of_architectures(name: str, own: str, tmp_path: Path) -> None:
    found = metadata(tmp_path, name, {"block_count": 3, "rope.freq_base": 5e5})
    assert found.architecture == own
    assert (found.size("block_count"), found.number("rope.freq_base")) == (3, 5e5)


# Tensors


def test_gpt_oss_of_ollama(tmp_path: Path) -> None:
    file, _ = make(tmp_path, "gpt_oss")
    expected = logits(file)
    names = {".attn_output.": ".attn_out.", ".attn_sinks.weight": ".attn_sinks", ".post_attention_norm.": ".ffn_norm."}
    tensors: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        for old, new in names.items():
            if old in tensor.name:
                tensors |= {tensor.name: None, tensor.name.replace(old, new): np.array(tensor.data)}
    fields = gguf.GGUFReader(file).fields.items()
    keys = {key: (field.contents(), field.types) for key, field in fields if key.startswith("gpt-oss.")}
    changes: dict[str, Any] = {"general.architecture": "gptoss"}
    for key, (value, _) in keys.items():
        changes |= {key: None, key.replace("gpt-oss.", "gptoss."): value}
    del changes["gptoss.expert_feed_forward_length"]
    rewrite(file, changes, tensors)
    np.testing.assert_array_equal(logits(file), expected)


def test_parts_that_are_no_language_model_are_skipped(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    expected = logits(file)
    names = ("v.patch_embd.weight", "mm.0.weight", "a.conv.weight", "mtp.0.weight", "blk.0.attn_rot_embd")
    others = {name: np.ones((2, 2), np.float32) for name in (*names, "blk.1.rope_freqs.weight")}
    rewrite(file, {}, others)
    np.testing.assert_array_equal(logits(file), expected)


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    expected = logits(file)
    tokens, types, scores = byte_vocabulary(303)
    names = {"tokens": tokens, "token_type": types, "scores": scores}
    rewrite(file, {f"tokenizer.ggml.{name}": values for name, values in names.items()})
    np.testing.assert_array_equal(logits(file), expected)
    assert len(Tokenizer(resolve_model(file).path)) == 300


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_gate_and_up_of_experts_in_one_tensor(model: str, tmp_path: Path) -> None:
    file, _ = make(tmp_path, model)
    expected = logits(file)
    stored = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(file).tensors}
    tensors: dict[str, Any] = {}
    for name in [name for name in stored if "ffn_gate_exps" in name]:
        up = name.replace("gate", "up")
        tensors |= {
            name: None,
            up: None,
            name.replace("gate", "gate_up"): np.concatenate([stored[name], stored[up]], 1),
        }
    assert tensors
    architecture = gguf.GGUFReader(file).fields["general.architecture"].contents()
    rewrite(file, {"general.architecture": architecture}, tensors)
    np.testing.assert_array_equal(logits(file), expected)


@pytest.mark.parametrize("suffix", ["scale", "weight.scale"])
def test_nvfp4_with_a_scale_next_to_it(suffix: str, tmp_path: Path) -> None:
    """llama.cpp since 2026: the product of the matrix is multiplied by the factor."""
    model, rng = TinyModel(head_dim=16, ffn=128), np.random.default_rng(3)
    weights = model.weights()
    file = write_gguf(tmp_path / "m.gguf", model, weights)
    kind = gguf.GGMLQuantizationType.NVFP4
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = weights["model.layers.0.mlp.up_proj.weight"].shape
    codes = rng.integers(0, 256, (shape[0], shape[1] // size * block_bytes), np.uint8)
    codes.reshape(shape[0], -1, block_bytes)[..., : size // 16] &= 0x37  # scales that are finite and small
    values = gguf.dequantize(codes, kind)

    def write(tensors: dict[str, Any], path: Path) -> Path:
        writer = gguf.GGUFWriter(path, "llama")
        reader = gguf.GGUFReader(file)
        for name, field in reader.fields.items():
            if not name.startswith("GGUF.") and name != "general.architecture":
                sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
        for tensor in reader.tensors:
            if tensor.name != "blk.0.ffn_up.weight":
                writer.add_tensor(tensor.name, np.array(tensor.data))
        for name, data in tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind if data.dtype == np.uint8 else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    factor = np.array([0.5], np.float32)
    name = "blk.0.ffn_up"
    scaled = {f"{name}.weight": codes, f"{name}.{suffix}": factor, f"{name}.input_scale": factor}
    found = logits(write(scaled, tmp_path / "scaled.gguf"))
    expected = logits(write({f"{name}.weight": (values * factor).astype(np.float32)}, tmp_path / "plain.gguf"))
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.02 * float(np.abs(expected).max()))
    unscaled = logits(write({f"{name}.weight": codes}, tmp_path / "unscaled.gguf"))
    assert float(np.abs(unscaled - expected).max()) > 0.05 * float(np.abs(expected).max())


# Files


def test_a_file_without_its_suffix(tmp_path: Path) -> None:
    """Ollama's blobs."""
    file = tiny(tmp_path / "m.gguf")
    expected = logits(file)
    blob = tmp_path / "sha256-0123abcd"
    file.rename(blob)
    np.testing.assert_array_equal(logits(blob), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.type": "adapter"}, r"m\.gguf is a LoRA adapter, .*merge it"),
        ({"general.type": "mmproj", "general.architecture": "clip"}, r"m\.gguf is a vision projector \(mmproj\)"),
        ({"general.architecture": "clip"}, r"m\.gguf is a vision projector \(mmproj\)"),
        ({"general.type": "imatrix"}, r"m\.gguf is an importance matrix"),
    ],
)
def test_files_that_belong_to_a_model(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    rewrite(file, changes)
    with pytest.raises(InputError, match=message):
        resolve_model(file)


def test_sampling_that_the_file_recommends(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    keys: dict[str, Any] = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_last_n": 64, "mirostat": 0}
    rewrite(file, {f"general.sampling.{key}": value for key, value in keys.items()})
    assert default_sampling(resolve_model(file).path, AUTO, {}) == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    file = tiny(tmp_path / "m.gguf")
    rewrite(file, {"llama.attention.causal": False})
    with pytest.raises(InputError, match="attention in both directions"):
        resolve_model(file)
