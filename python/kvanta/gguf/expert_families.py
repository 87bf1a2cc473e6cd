"""Architectures with experts in GGUF files: Mistral Small 4, AFMoE, Hunyuan, MiMo-V2, Step 3.5."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.deepseek import deepseek2, experts
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.predicted_layers import leave_out_predicted_layers
from kvanta.gguf.rope_scaling import STEP35, llama3_scaling
from kvanta.gguf.window_families import window_layers

Config = dict[str, Any]
_SIGMOID = 2  # expert_gating_func


def mistral4(metadata: Metadata, config: Config) -> None:
    deepseek2(metadata, config)
    config["norm_topk_prob"] = metadata.flag("mistral4.expert_weights_norm", True)
    if config["rope_scaling"] is not None:
        beta = metadata.number("attention.temperature_scale", 0.1)  # llama.cpp's conversion leaves it out
        config["rope_scaling"]["llama_4_scaling_beta"] = beta


def afmoe(metadata: Metadata, config: Config) -> None:
    window_layers(metadata, config, 4)
    scale = metadata.value("afmoe.expert_weights_scale")
    config |= {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_shared_experts": metadata.count("expert_shared_count"),
        "num_dense_layers": metadata.count("leading_dense_block_count"),
        "route_scale": metadata.number("expert_weights_scale") if scale else 1.0,
        "route_norm": metadata.flag("afmoe.expert_weights_norm", True),
        "score_func": "sigmoid" if metadata.count("expert_gating_func") in (0, _SIGMOID) else "softmax",
        "mup_enabled": True,
    }


def hunyuan_moe(metadata: Metadata, config: Config) -> None:
    config |= {
        "num_experts": metadata.size("expert_count"),
        "moe_topk": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length", config["intermediate_size"]),
        "num_shared_expert": metadata.count("expert_shared_count"),
    }


def _by_layer(metadata: Metadata, name: str, layers: int) -> list[float]:
    """A number for each layer, 0 where the file has none."""
    key = f"{metadata.architecture}.{name}"
    value = metadata.value(key)
    if value is None:
        return [0.0] * layers
    return metadata.array(key, float)[:layers] if isinstance(value, list) else [metadata.number(name)] * layers


def step35(metadata: Metadata, config: Config) -> None:
    """As llama.cpp has it: full attention rotates half of a head, windows all of it."""
    blocks = config["num_hidden_layers"]
    heads, kv_heads = (metadata.sizes(f"attention.{name}", blocks) for name in ("head_count", "head_count_kv"))
    flags = metadata.array("step35.attention.sliding_window_pattern", bool, blocks)
    leave_out_predicted_layers(metadata, config)
    layers = config["num_hidden_layers"]
    heads, flags = heads[:layers], flags[:layers]
    of_kind = {
        flag: {count for count, each in zip(heads, flags, strict=True) if each == flag} for flag in (False, True)
    }
    if any(len(counts) > 1 for counts in of_kind.values()) or len(set(kv_heads[:layers])) != 1:
        raise InputError(f"{metadata.path} has layers of one kind with different numbers of heads, which do not fit")
    full, sliding = (next(iter(of_kind[flag]), heads[0]) for flag in (False, True))
    theta, head_dim = config.pop("rope_theta"), config["head_dim"]
    scaling = llama3_scaling(metadata, head_dim, theta, STEP35) or {"rope_type": "default"}
    base = metadata.number("rope.freq_base_swa", theta)
    scale = metadata.value("step35.expert_weights_scale")
    has_experts = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors for layer in range(layers)]
    config |= {
        "num_attention_heads": full,
        "num_key_value_heads": kv_heads[0],
        "num_sliding_attention_heads": sliding,
        "per_layer_config": {
            str(i): {"num_attention_heads": sliding} for i, flag in enumerate(flags) if flag and sliding != full
        },
        "intermediate_size": max(metadata.sizes("feed_forward_length", blocks)),
        "share_expert_dim": metadata.size("expert_shared_feed_forward_length"),
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags],
        "mlp_layer_types": ["sparse" if has else "dense" for has in has_experts],
        "swiglu_limits": _by_layer(metadata, "swiglu_clamp_exp", layers),
        "swiglu_limits_shared": _by_layer(metadata, "swiglu_clamp_shexp", layers),
        "moe_router_scaling_factor": metadata.number("expert_weights_scale") if scale else 1.0,
        "norm_expert_weight": metadata.flag("step35.expert_weights_norm", True),
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": theta, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        },
    }
    experts(metadata, config, "n_routed_experts")


def mimo2(metadata: Metadata, config: Config) -> None:
    blocks = config["num_hidden_layers"]
    flags = metadata.array("mimo2.attention.sliding_window_pattern", int, blocks)
    heads = metadata.sizes("attention.head_count_kv", blocks)
    leave_out_predicted_layers(metadata, config)
    layers = config["num_hidden_layers"]
    full = min(heads[:layers])
    if heads != [full * (2 if flag else 1) for flag in flags]:
        raise InputError(f"{metadata.path} has other numbers of KV heads than {full}, and {2 * full} in windows")
    theta = config.pop("rope_theta")
    partial = metadata.size("rope.dimension_count") / config["head_dim"]
    bases = {"full_attention": theta, "sliding_attention": metadata.number("rope.freq_base_swa", theta)}
    has_experts = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors for layer in range(layers)]
    config |= {
        "num_key_value_heads": full,
        "per_layer_config": {str(i): {"num_key_value_heads": heads[i]} for i in range(layers)},
        "intermediate_size": max(metadata.sizes("feed_forward_length", blocks)),
        "v_head_dim": metadata.size("attention.value_length"),
        "attention_value_scale": metadata.number("attention.value_scale", 0.707),  # old files lack it
        "sliding_window": metadata.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags[:layers]],
        "mlp_layer_types": ["sparse" if has else "dense" for has in has_experts],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": partial}
            for kind, base in bases.items()
        },
    }
    experts(metadata, config, "n_routed_experts")
    config |= {"n_group": 1, "topk_group": 1, "norm_topk_prob": True}
