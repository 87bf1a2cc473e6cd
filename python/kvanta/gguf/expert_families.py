"""Keys of experts in GGUF files, and of architectures with experts: DeepSeek, Mistral Small 4, AFMoE, Hunyuan."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.window_families import window_layers

Config = dict[str, Any]
_SIGMOID = 2  # expert_gating_func


def experts(metadata: Metadata, config: Config, count_key: str) -> None:
    config[count_key] = metadata.size("expert_count")
    config["num_experts_per_tok"] = metadata.size("expert_used_count")
    if metadata.has("expert_feed_forward_length"):
        config["moe_intermediate_size"] = metadata.size("expert_feed_forward_length")


def deepseek_experts(metadata: Metadata, config: Config) -> None:
    if metadata.count("expert_count") == 0:
        config["n_routed_experts"] = None  # absent, it would be the class's default
        return
    experts(metadata, config, "n_routed_experts")
    config["n_shared_experts"] = metadata.count("expert_shared_count")
    config["first_k_dense_replace"] = metadata.count("leading_dense_block_count")
    scale = metadata.value(f"{metadata.architecture}.expert_weights_scale")
    config["routed_scaling_factor"] = metadata.number("expert_weights_scale") if scale else 1.0
    config["norm_topk_prob"] = metadata.flag(f"{metadata.architecture}.expert_weights_norm", False)


def deepseek_groups(metadata: Metadata, config: Config) -> None:
    """Groups of experts. Files written before the keys existed are of DeepSeek's own models."""
    known = {256: (8, 4), 160: (8, 3)}
    groups, used = known.get(config.get("n_routed_experts", 0), (1, 1))
    config["n_group"] = metadata.size("expert_group_count", groups)
    config["topk_group"] = metadata.size("expert_group_used_count", used)


def deepseek2(metadata: Metadata, config: Config) -> None:
    rank, rope = metadata.size("attention.kv_lora_rank"), metadata.size("rope.dimension_count")
    has_mla_keys = metadata.has("attention.key_length_mla")  # newer files: the others describe the latent
    key = metadata.size("attention.key_length_mla" if has_mla_keys else "attention.key_length")
    value = metadata.size("attention.value_length_mla" if has_mla_keys else "attention.value_length")
    if key <= rope:
        raise InputError(f"{metadata.path} has keys of {key} channels, of which {rope} are rotated, which do not fit")
    config |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value}
    config["q_lora_rank"] = metadata.count("attention.q_lora_rank") or None
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["head_dim"] = rope
    scaling = config["rope_scaling"]
    if metadata.value("deepseek2.attention.temperature_scale"):
        raise InputError(f"{metadata.path} has queries that grow with the position; 'deepseek2' models do not")
    if scaling is not None and metadata.has("rope.scaling.yarn_log_multiplier"):
        mscale = round(10 * metadata.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    deepseek_experts(metadata, config)
    if metadata.count("expert_gating_func") == _SIGMOID:
        config["architectures"], config["model_type"] = ["DeepseekV3ForCausalLM"], "deepseek_v3"
        deepseek_groups(metadata, config)
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return
    config["norm_topk_prob"] = False
    deepseek_groups(metadata, config)
    config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"


def mistral4(metadata: Metadata, config: Config) -> None:
    deepseek2(metadata, config)
    config["norm_topk_prob"] = metadata.flag("mistral4.expert_weights_norm", True)
    if config["rope_scaling"] is not None:
        beta = metadata.number("attention.temperature_scale", 0.1)  # llama.cpp's conversion leaves it out
        config["rope_scaling"]["llama_4_scaling_beta"] = beta


def leave_out_predicted_layers(metadata: Metadata, config: Config) -> None:
    """Layers that predict several tokens, which the file counts as blocks."""
    predicted, blocks = metadata.count("nextn_predict_layers"), config["num_hidden_layers"]
    if predicted >= blocks:
        raise InputError(f"{metadata.path} has {blocks} blocks, all of which predict further tokens")
    config["num_nextn_predict_layers"] = predicted
    config["num_hidden_layers"] -= predicted


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
