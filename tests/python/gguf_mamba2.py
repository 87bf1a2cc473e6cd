"""Layers of Mamba-2 in GGUF files, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np
import tiny_models
from numpy.typing import NDArray

Array = NDArray[np.float32]
_MODULE = re.compile(r"(.+\.(?:mamba|mixer)\.)(A_log|D|dt_bias|conv1d\.weight|norm\.weight)")
# Widths of whole blocks.
_MAMBA2 = tiny_models.MAMBA2 | {"mamba_d_state": 32}
_GRANITE = _MAMBA2 | {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "nope",
}
_NEMOTRON = {"head_dim": 32, "ssm_state_size": 32, "time_step_min": 1e-9}
_NEMOTRON_EXPERTS = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite_hybrid": ("GraniteMoeHybrid", _GRANITE | {"num_local_experts": 0}),
    "granite_hybrid_experts": (
        "GraniteMoeHybrid",
        _GRANITE | {"num_local_experts": 8, "shared_intermediate_size": 64, "mamba_n_groups": 1},
    ),
    # The factors are in the weights of a file.
    "falcon_h1": (
        "FalconH1",
        {"head_dim": 32, "mamba_d_state": 32, "mamba_norm_before_gate": False}
        | {key: None if isinstance(value, list) else 1.0 for key, value in tiny_models.FALCON_FACTORS.items()},
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON),
    "nemotron_h_moe": ("NemotronH", _NEMOTRON | tiny_models.NEMOTRON_EXPERTS | _NEMOTRON_EXPERTS),
    "nemotron_h_moe_latent": (
        "NemotronH",
        _NEMOTRON | tiny_models.NEMOTRON_EXPERTS | _NEMOTRON_EXPERTS | {"moe_latent_size": 32, "mlp_bias": True},
    ),
    "bamba": (
        "Bamba",
        {key: value for key, value in _MAMBA2.items() if key != "layer_types"}
        | {"attn_layer_indices": [1], "hidden_size": 128},
    ),
}


def parts(config: dict[str, Any], name: str, values: Array) -> dict[str, Array] | None:
    """A tensor in GGUF's shape under a name that the gguf package's table knows; None for those of other modules."""
    found = _MODULE.fullmatch(name)
    if not found:
        return None
    module, tensor = found.groups()
    if tensor == "A_log":
        return {name: -np.exp(values)[:, None]}
    if tensor == "D":
        return {name: values[:, None]}
    if tensor == "dt_bias":
        return {f"{module}dt_proj.bias": values}
    if tensor == "conv1d.weight":
        return {name: np.ascontiguousarray(values[:, 0])}
    return {name: values.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)}


def is_kept(name: str) -> bool:
    """True for tensors that are not rounded, and are in a file in another form than in the checkpoint."""
    return name.endswith((".A_log", ".dt_proj.bias"))


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Keys of the layers, and which of them have attention."""
    get = config.get
    heads = get("mamba_n_heads") or config["mamba_num_heads"]
    writer.add_ssm_conv_kernel(get("mamba_d_conv") or config["conv_kernel"])
    writer.add_ssm_state_size(get("mamba_d_state") or config["ssm_state_size"])
    writer.add_ssm_group_count(get("mamba_n_groups") or config["n_groups"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * (get("mamba_d_head") or config["mamba_head_dim"]))
    kinds: list[str] = get("layer_types") or get("layers_block_type") or []
    if "attn_layer_indices" in config:
        layers = range(config["num_hidden_layers"])
        kinds = ["full_attention" if i in config["attn_layer_indices"] else "linear_attention" for i in layers]
        writer.add_rope_dimension_count(int(config["hidden_size"] // config["num_attention_heads"] * 0.5))
        writer.add_rope_scaling_finetuned(True)
    if kinds:
        kv_heads = config["num_key_value_heads"]
        writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    if config["model_type"] == "nemotron_h":
        widths = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
        writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds])
    if "moe" in kinds:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    if config["model_type"] == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(False)
