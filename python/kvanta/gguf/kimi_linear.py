"""Kimi Linear in GGUF files: layers of latent attention, and others that have Kimi Delta Attention in its place."""

from __future__ import annotations

from typing import Any

from kvanta.gguf.latents import latent_sizes
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.recurrent_families import kv_heads_of_layers


def kimi_linear(metadata: Metadata, config: dict[str, Any]) -> None:
    heads = kv_heads_of_layers(metadata, config["num_hidden_layers"])
    latent_sizes(metadata, config)
    config |= {
        "layer_types": ["full_attention" if count else "linear_attention" for count in heads],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": metadata.size("kda.head_dim"),
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_token": metadata.size("expert_used_count"),
        "num_shared_experts": metadata.count("expert_shared_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.count("leading_dense_block_count"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
    }
