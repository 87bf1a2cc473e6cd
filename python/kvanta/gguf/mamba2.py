"""The keys of hybrids with layers of Mamba-2 in GGUF files: Granite 4, Bamba, Falcon-H1, Nemotron-H and Nemotron 3."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.predicted_layers import leave_out_predicted_layers

Config = dict[str, Any]


def _sizes(metadata: Metadata) -> dict[str, int]:
    """Heads, channels of a head, groups, states and taps."""
    heads, width = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    if width % heads != 0:
        raise InputError(f"{metadata.path} has {heads} heads of {width} channels together, which do not fit")
    return {
        "heads": heads,
        "head_dim": width // heads,
        "groups": metadata.size("ssm.group_count"),
        "state": metadata.size("ssm.state_size"),
        "taps": metadata.size("ssm.conv_kernel"),
    }


def _has_bias(metadata: Metadata, module: str) -> bool:
    return any(name.endswith(f".{module}.bias") for name in metadata.tensors)


def _mamba(metadata: Metadata, config: Config) -> None:
    sizes = _sizes(metadata)
    config |= {
        "mamba_n_heads": sizes["heads"],
        "mamba_d_head": sizes["head_dim"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_state": sizes["state"],
        "mamba_d_conv": sizes["taps"],
        "mamba_conv_bias": _has_bias(metadata, "ssm_conv1d"),
    }


def _by_layer(metadata: Metadata, name: str, layers: int) -> list[int]:
    """A number of each layer, 0 in layers of another kind."""
    numbers: list[int] = metadata.array(f"{metadata.architecture}.{name}", int, layers)
    kinds = set(numbers) - {0}
    if len(kinds) > 1 or any(isinstance(number, bool) or not 0 <= number < 1 << 31 for number in numbers):
        raise InputError(
            f"{metadata.path}: key '{metadata.architecture}.{name}' must list 0 and one more number below 2^31"
        )
    return numbers


def _heads(metadata: Metadata, config: Config) -> list[int]:
    """KV heads of each layer; 0: no attention."""
    kv_heads = _by_layer(metadata, "attention.head_count_kv", config["num_hidden_layers"])
    config["num_key_value_heads"] = max(kv_heads)
    if max(kv_heads) == 0 or config["num_attention_heads"] % max(kv_heads) != 0:
        heads = config["num_attention_heads"]
        raise InputError(f"{metadata.path} has {heads} heads for {max(kv_heads)} KV heads, which do not fit")
    return kv_heads


def granite_hybrid(metadata: Metadata, config: Config) -> None:
    _mamba(metadata, config)
    config["mamba_expand"] = metadata.size("ssm.inner_size") // config["hidden_size"]
    kv_heads = _heads(metadata, config)
    config["layer_types"] = ["full_attention" if count else "linear_attention" for count in kv_heads]
    config["attention_bias"] = _has_bias(metadata, "attn_q")
    if metadata.flag("granitehybrid.rope.scaling.finetuned", True):
        _bamba(metadata, config)
        return
    config["position_embedding_type"] = "nope"
    head_scale = config["head_dim"] ** -0.5
    config |= {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", head_scale),
        "logits_scaling": metadata.number("logit_scale", 1.0),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_local_experts": metadata.count("expert_count"),
    }
    config["shared_intermediate_size"] = config["intermediate_size"]
    if config["num_local_experts"] > 0:
        config["num_experts_per_tok"] = metadata.size("expert_used_count")
        config["shared_intermediate_size"] = metadata.size("expert_shared_feed_forward_length")


def _bamba(metadata: Metadata, config: Config) -> None:
    """Granite's layers with rope, which Granite 4 has none of."""
    rotated = metadata.size("rope.dimension_count", config["head_dim"])
    if rotated == config["head_dim"]:  # not in the file: every published Bamba rotates a half
        rotated //= 2
    config |= {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attn_layer_indices": [i for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"],
        "partial_rotary_factor": rotated / config["head_dim"],
        "intermediate_size": metadata.size("feed_forward_length"),
        "mlp_bias": _has_bias(metadata, "ffn_up"),
    }


def falcon_h1(metadata: Metadata, config: Config) -> None:
    """Its factors are in the file's weights."""
    _mamba(metadata, config)
    config["mamba_d_ssm"] = metadata.size("ssm.inner_size")
    config["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in metadata.tensors
    config["mamba_norm_before_gate"] = False
    config["mlp_bias"] = _has_bias(metadata, "ffn_up")


def nemotron_h(metadata: Metadata, config: Config) -> None:
    sizes, kv_heads = _sizes(metadata), _heads(metadata, config)
    widths = _by_layer(metadata, "feed_forward_length", config["num_hidden_layers"])
    leave_out_predicted_layers(metadata, config)
    with_experts = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.tensors for layer in range(len(widths))]
    config["layer_types"] = [
        "full_attention" if count else "moe" if experts else "mlp" if width else "linear_attention"
        for count, experts, width in zip(kv_heads, with_experts, widths, strict=True)
    ][: config["num_hidden_layers"]]
    config |= {
        "intermediate_size": max(1, *widths),
        "layer_norm_epsilon": config.pop("rms_norm_eps"),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["head_dim"],
        "n_groups": sizes["groups"],
        "ssm_state_size": sizes["state"],
        "conv_kernel": sizes["taps"],
        "use_conv_bias": _has_bias(metadata, "ssm_conv1d"),
        "time_step_min": 0.0,
        "mlp_bias": _has_bias(metadata, "ffn_up") or _has_bias(metadata, "ffn_up_shexp"),
    }
    if "moe" in config["layer_types"]:
        config |= {
            "n_routed_experts": metadata.size("expert_count"),
            "num_experts_per_tok": metadata.size("expert_used_count"),
            "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": metadata.size("expert_shared_feed_forward_length"),
            "moe_latent_size": metadata.count("moe_latent_size") or None,
            "n_group": metadata.size("expert_group_count", 1),
            "topk_group": metadata.size("expert_group_used_count", 1),
            "norm_topk_prob": metadata.flag(f"{metadata.architecture}.expert_weights_norm", True),
            "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        }
