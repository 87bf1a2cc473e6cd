"""Gemma 4 in GGUF files, as llama.cpp's convert_hf_to_gguf.py writes it."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import gguf
import numpy as np

_WHOLE_BLOCKS = {"head_dim": 32, "global_head_dim": 64, "vocab_size_per_layer_input": 300}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", _WHOLE_BLOCKS),
    "gemma4_k_eq_v": ("Gemma4", _WHOLE_BLOCKS | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_shared_layers": (
        "Gemma4",
        _WHOLE_BLOCKS
        | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_experts": (
        "Gemma4",
        _WHOLE_BLOCKS
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "attention_k_eq_v": True,
            "final_logit_softcapping": None,
        },
    ),
}
_SCALES = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}


def part_name(name: str) -> str:
    """A tensor's name that the gguf package's table knows."""
    return name if name.endswith((".weight", ".bias", "scale")) else f"{name}.weight"


def tensor_name(tensors: Container[str], part: str) -> str:
    """The tensor whose part_name is `part`."""
    return part if part in tensors else part.removesuffix(".weight")


def target(name: str) -> str | None:
    """GGUF's names that the table does not have."""
    found = re.fullmatch(r"model\.layers\.(\d+)\.(\S+)", name)
    return f"blk.{found[1]}.{_SCALES[found[2]]}" if found and found[2] in _SCALES else None


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    is_full = [kind == "full_attention" for kind in config["layer_types"]]
    full = next(heads for layer, heads in config["per_layer_config"].items() if is_full[int(layer)])
    heads, kv_heads = config["head_dim"], config["num_key_value_heads"]
    writer.add_head_count_kv([full.get("num_key_value_heads", kv_heads) if each else kv_heads for each in is_full])
    for suffix, size in (("", full["head_dim"]), ("_swa", heads)):
        for key in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{key}{suffix}")(size)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    width = config["intermediate_size"]
    widths = [width] * (layers - shared) + [width * (2 if config["use_double_wide_mlp"] else 1)] * shared
    writer.add_feed_forward_length(widths if config["use_double_wide_mlp"] else width)
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    pairs = full["head_dim"] // 2
    rotated = int(pairs * ropes["full_attention"]["partial_rotary_factor"])
    writer.add_tensor("rope_freqs.weight", np.array([1] * rotated + [1e30] * (pairs - rotated), np.float32))
