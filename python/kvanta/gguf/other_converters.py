"""Keys and tensors of GGUF files as Ollama and old or new converters write them, under the names of llama.cpp's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvanta.gguf.header import TensorInfo

Values = dict[str, Any]
Tensors = dict[str, TensorInfo]

_ARCHITECTURE = "general.architecture"
_ARCHITECTURES = {"gptoss": "gpt-oss", "olmo3": "olmo2"}
# Vision, projectors, sound, and the prediction of further tokens, which Ollama keeps in the model's file.
_OTHER_PARTS = ("v.", "mm.", "a.", "mtp.")
# Tables of rope frequencies in the layers of old files; llama.cpp skips them, too.
_NO_WEIGHTS = re.compile(r"blk\.\d+\.(attn_rot_embd|rope_freqs|attn\.rot_embd)(\.weight)?")
_WEIGHT_SCALE = re.compile(r"(.+)\.weight\.(scale|input_scale)")
_TOKEN_ARRAYS = ("tokens", "scores", "token_type")
_GEMMA3_NAMES = {"rope.global.freq_base": "rope.freq_base", "rope.local.freq_base": "rope.freq_base_swa"}
_GEMMA3_EPSILON = "gemma3.attention.layer_norm_rms_epsilon"
_GEMMA3_DEFAULTS = {_GEMMA3_EPSILON: 1e-6, "gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 1e4}
_GEMMA3_SCALED_CONTEXT = 131_072
_GPT_OSS_TENSORS = {
    r"\.attn_out\.": ".attn_output.",
    r"\.attn_sinks$": ".attn_sinks.weight",
    r"\.ffn_norm\.": ".post_attention_norm.",
}


def translate(values: Values, tensors: Tensors) -> None:
    """Changes both in place."""
    own = values.get(_ARCHITECTURE)
    if not isinstance(own, str):
        return
    is_ollama_gemma3 = own == "gemma3" and _is_ollama_gemma3(values, tensors)
    for name in [name for name in tensors if name.startswith(_OTHER_PARTS) or _NO_WEIGHTS.fullmatch(name)]:
        del tensors[name]
    for name in [name for name in tensors if _WEIGHT_SCALE.fullmatch(name)]:
        _rename(tensors, name, _WEIGHT_SCALE.sub(r"\1.\2", name))
    if own in _ARCHITECTURES:
        _rename_architecture(values, own, _ARCHITECTURES[own])
    if own == "gptoss":
        _translate_gpt_oss(values, tensors)
    elif is_ollama_gemma3:
        _translate_gemma3(values)
    elif own == "qwen35moe":
        _translate_qwen35_moe(values, tensors)
    _leave_out_tokens_without_rows(values, tensors)


def _rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = replace(tensors.pop(old), name=new)


def _rename_architecture(values: Values, old: str, new: str) -> None:
    values[_ARCHITECTURE] = new
    for key in [key for key in values if key.startswith(f"{old}.")]:
        values[new + key[len(old) :]] = values.pop(key)


def _translate_gpt_oss(values: Values, tensors: Tensors) -> None:
    for name in list(tensors):
        for pattern, text in _GPT_OSS_TENSORS.items():
            if re.search(pattern, name):
                _rename(tensors, name, re.sub(pattern, text, name))
    gate = tensors.get("blk.0.ffn_gate_exps.weight")
    if gate is not None and len(gate.shape) == 3:
        values.setdefault("gpt-oss.expert_feed_forward_length", gate.shape[1])


def _is_ollama_gemma3(values: Values, tensors: Mapping[str, TensorInfo]) -> bool:
    keys = ("gemma3.mm.tokens_per_image", *(f"gemma3.{name}" for name in _GEMMA3_NAMES))
    parts = ("tokenizer.ggml.add_padding_token", "tokenizer.ggml.add_unknown_token")
    return (
        any(key in values for key in (*keys, *parts))
        or _GEMMA3_EPSILON not in values
        or any(name.startswith(("v.", "mm.")) for name in tensors)
    )


def _translate_gemma3(values: Values) -> None:
    for old, new in _GEMMA3_NAMES.items():
        if f"gemma3.{old}" in values:
            values.setdefault(f"gemma3.{new}", values[f"gemma3.{old}"])
    for key, value in _GEMMA3_DEFAULTS.items():
        values.setdefault(key, value)
    # The models of 4 B and more, whose configuration the old converter did not write.
    context = values.get("gemma3.context_length")
    if isinstance(context, int) and context >= _GEMMA3_SCALED_CONTEXT:
        values.setdefault("gemma3.rope.scaling.type", "linear")
        values.setdefault("gemma3.rope.scaling.factor", 8.0)


def _translate_qwen35_moe(values: Values, tensors: Tensors) -> None:
    key = "qwen35moe.attention.head_count_kv"  # by layer, 0 where there is no attention
    counts = values.get(key)
    if isinstance(counts, list) and counts and all(isinstance(count, int) for count in counts):
        values[key] = max(counts)
    for name in [name for name in tensors if name.endswith(".ssm_dt")]:
        _rename(tensors, name, f"{name}.bias")


def _leave_out_tokens_without_rows(values: Values, tensors: Tensors) -> None:
    embeddings = tensors.get("token_embd.weight")
    rows = embeddings.shape[0] if embeddings is not None and len(embeddings.shape) == 2 else None
    for name in _TOKEN_ARRAYS:
        listed = values.get(f"tokenizer.ggml.{name}")
        if rows is not None and isinstance(listed, list) and len(listed) > rows:
            values[f"tokenizer.ggml.{name}"] = listed[:rows]
