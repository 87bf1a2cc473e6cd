"""Keys and tensors of LFM2 and LFM2-MoE in GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import tiny_models
from numpy.typing import NDArray

Array = NDArray[np.float32]
MODEL_TYPES = ("lfm2", "lfm2_moe")
LFM2 = tiny_models.LFM2 | {"block_multiple_of": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", LFM2 | {"intermediate_size": 144}),
    "lfm2_tied": ("Lfm2", LFM2 | {"tie_word_embeddings": True, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (
        "Lfm2Moe",
        LFM2
        | {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_dense_layers": 2,
            "tie_word_embeddings": True,  # files have no output matrix
        },
    ),
}


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Keys of heads, norms, convolutions, MLPs and experts. Files have no size of heads."""
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_feed_forward_length(mlp_width(config))
    if config["model_type"] == "lfm2_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def mlp_width(config: dict[str, Any]) -> int:
    width: int = config["intermediate_size"]
    if not config.get("block_auto_adjust_ff_dim"):
        return width
    width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
    multiple: int = config["block_multiple_of"]
    return -(-width // multiple) * multiple


def part(name: str, values: Array) -> tuple[str, Array] | None:
    """A tensor by the name that the gguf package's table knows, in GGUF's shape; None: as the checkpoint has it."""
    if name.endswith(".conv.conv.weight"):
        return name, values[:, 0]
    if name.endswith(".expert_bias"):
        return f"{name}.bias", values
    return None


def back(tensors: dict[str, Array], name: str, values: Array) -> bool:
    """Puts a part's values into the checkpoint's tensors."""
    name = name.removesuffix(".bias") if name.endswith(".expert_bias.bias") else name
    if not name.endswith((".conv.conv.weight", ".expert_bias")):
        return False
    tensors[name] = values.reshape(tensors[name].shape)
    return True
