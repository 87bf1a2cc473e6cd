"""LFM2 in GGUF files: layers of attention, and others that have a gated short convolution in its place."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata

Config = dict[str, Any]
_SIGMOID = 2  # expert_gating_func


def kv_heads_of_layers(metadata: Metadata, layers: int) -> list[int]:
    """KV heads of each layer, 0 in layers without attention; the same in all others."""
    name = "attention.head_count_kv"
    key = f"{metadata.architecture}.{name}"
    if not isinstance(metadata.value(key), list):
        return [metadata.size(name)] * layers
    heads: list[int] = metadata.array(key, int, layers)
    counts = {*heads} - {0}
    if len(counts) != 1 or any(isinstance(count, bool) for count in heads) or not 0 < min(counts) < 1 << 31:
        raise InputError(
            f"{metadata.path}: key {key!r} must list 0 and one other number of heads, got {str(heads)[:60]}"
        )
    return heads


def lfm2(metadata: Metadata, config: Config) -> None:
    if metadata.count("attention.sliding_window") > 0:
        raise InputError(
            f"{metadata.path} has layers with a sliding window, which {metadata.architecture!r} models lack"
        )
    heads = kv_heads_of_layers(metadata, config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads]
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["conv_L_cache"] = metadata.size("shortconv.l_cache")
    config["conv_bias"] = False
    config["block_auto_adjust_ff_dim"] = False  # the file has the adjusted width


def lfm2_moe(metadata: Metadata, config: Config) -> None:
    lfm2(metadata, config)
    del config["block_auto_adjust_ff_dim"]
    if metadata.count("expert_gating_func") != _SIGMOID:
        raise InputError(f"{metadata.path}: key 'lfm2moe.expert_gating_func' must be {_SIGMOID}, a sigmoid")
    scale = metadata.value("lfm2moe.expert_weights_scale")
    config |= {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "num_dense_layers": metadata.count("leading_dense_block_count"),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in metadata.tensors),
        "norm_topk_prob": True,
        "routed_scaling_factor": metadata.number("expert_weights_scale") if scale else 1.0,
    }
