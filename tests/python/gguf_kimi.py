"""Keys and tensors of Kimi Linear in GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import tiny_models
from numpy.typing import NDArray

Array = NDArray[np.float32]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": (
        "KimiLinear",
        tiny_models.KIMI_LINEAR
        | {"qk_nope_head_dim": 32, "v_head_dim": 32, "linear_head_dim": 32, "moe_intermediate_size": 32},
    ),
}
# DeepSeek's names of keys, which other modules take.
_COMMON_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}


def with_common_names(config: dict[str, Any]) -> dict[str, Any]:
    return config | {name: config[own] for own, name in _COMMON_NAMES.items() if own in config}


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv([1 if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])


def parts(name: str, values: Array) -> dict[str, Array] | None:
    """A tensor in GGUF's shape under a name that the gguf package's table knows; None for those of other modules."""
    if re.search(r"\.[qkv]_conv1d\.weight", name):
        return {name: values.reshape(1, values.shape[0], 1, -1)}
    if name.endswith("self_attn.A_log"):
        return {name: -np.exp(values)}
    if name.endswith("self_attn.dt_bias"):
        return {f"{name.removesuffix('dt_bias')}dt_proj.bias": values}
    return None


def table_name(name: str) -> str:
    """transformers saves the first layer's MLP under the name of the others' experts."""
    return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj", r".mlp.\1_proj", name)
