"""Gated DeltaNet layers of Qwen3-Next and Qwen3.5 in GGUF files, as llama.cpp's convert_hf_to_gguf.py orders them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
MODULE = ".linear_attn."


def places(config: dict[str, Any]) -> dict[str, tuple[str, int, Any]]:
    """GGUF's parts by their names in the module: the checkpoint's tensor, an axis, and indices on it."""
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    k_dim, v_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        # For each head of keys: q, k, and v and z of its heads of values.
        rows = np.arange(2 * (k_heads * k_dim + v_heads * v_dim)).reshape(k_heads, -1)
        q, k, v, z = np.split(rows, np.cumsum([k_dim, k_dim, v_heads // k_heads * v_dim]), axis=1)
        qkv = np.concatenate([part.ravel() for part in (q, k, v)])
        whole = "in_proj_qkvz.weight"
        return {"in_proj_qkv.weight": (whole, 0, qkv), "in_proj_z.weight": (whole, 0, z.ravel())}
    # The first head of values of each head of keys, then the second of each.
    heads = np.arange(v_heads).reshape(k_heads, -1).T.ravel()
    channels = np.arange(v_heads * v_dim).reshape(v_heads, v_dim)[heads].ravel()
    keys = 2 * k_heads * k_dim
    qkv = np.concatenate([np.arange(keys), keys + channels])
    axes = {
        "in_proj_qkv.weight": (0, qkv),
        "in_proj_z.weight": (0, channels),
        "in_proj_b.weight": (0, heads),
        "in_proj_a.weight": (0, heads),
        "conv1d.weight": (0, qkv),
        "A_log": (0, heads),
        "dt_bias": (0, heads),
        "out_proj.weight": (1, channels),
    }
    return {name: (name, axis, index) for name, (axis, index) in axes.items()}


def parts(config: dict[str, Any], name: str, values: Array) -> dict[str, Array]:
    """A tensor of the module in GGUF's order and shape, under names that the gguf package's table knows."""
    module, _, tensor = name.partition(MODULE)
    moved = {part: np.take(values, at, axis) for part, (whole, axis, at) in places(config).items() if whole == tensor}
    result = moved or {tensor: values}
    if tensor == "conv1d.weight":
        result = {tensor: result[tensor][:, 0]}
    elif tensor == "A_log":
        result = {tensor: -np.exp(result[tensor])}
    elif tensor == "dt_bias":
        result = {"dt_proj.bias": result[tensor]}
    return {f"{module}{MODULE}{part}": np.ascontiguousarray(part_values) for part, part_values in result.items()}


def back(config: dict[str, Any], tensors: dict[str, Array], name: str, values: Array) -> bool:
    """Puts the rounded values of a part into the checkpoint's tensors; those of no matrix are not rounded."""
    module, found, part = name.partition(MODULE)
    if not found:
        return False
    if part not in ("A_log", "dt_proj.bias", "conv1d.weight"):
        whole, axis, at = places(config).get(part, (part, 0, slice(None)))
        tensors[f"{module}{MODULE}{whole}"][(slice(None),) * axis + (at,)] = values
    return True


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Keys of the layers, and which of them have attention."""
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    types = config["layer_types"]
    interval = types.index("full_attention") + 1
    if types == ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(len(types))]:
        writer.add_full_attention_interval(interval)
    else:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in types])
