"""Settings of models with experts whose GGUF files are tested, in widths of whole blocks."""

from __future__ import annotations

from typing import Any

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
SPARSE_LATENTS = LATENTS | {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 8.0,
}
MODELS_WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {key: value for key, value in LATENTS.items() if key != "first_k_dense_replace"},
    ),
    "deepseek_v32": ("DeepseekV32", SPARSE_LATENTS | {"n_group": 4, "topk_group": 2}),
    "glm_moe_dsa": ("GlmMoeDsa", SPARSE_LATENTS),
    "glm_moe_dsa_shared": ("GlmMoeDsa", SPARSE_LATENTS | {"indexer_types": ["full", "shared", "full"]}),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "pad_token_id": 0},
    ),
    "ernie4_5_moe_interval": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "afmoe": (
        "Afmoe",
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "sliding_window": 24,
            "global_attn_every_n_layers": 4,
            "mup_enabled": True,
            "pad_token_id": 0,
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {"head_dim": 32, "num_experts": 8, "moe_topk": 3}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            "head_dim": 64,
            "v_head_dim": 32,
            "num_key_value_heads": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.0,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
                for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e4))
            },
            "pad_token_id": 0,
        },
    ),
    "mistral4": ("Mistral4", {**LATENTS, "pad_token_id": 0}),
    "step35": (
        "Step3p5",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "share_expert_dim": 64,
            "head_dim": 32,
            "query_pre_attn_scalar": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phimoe": ("Phimoe", {"num_local_experts": 8, "router_jitter_noise": 0.01}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granite_moe": ("GraniteMoe", GRANITE | {"num_local_experts": 8}),
    "granite_moe_shared": ("GraniteMoeShared", GRANITE | {"num_local_experts": 8, "shared_intermediate_size": 64}),
    "dots1": ("Dots1", SIGMOID_EXPERTS | {"first_k_dense_replace": 1, "norm_topk_prob": True, "sliding_window": None}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "num_shared_experts": 1,
            "num_hidden_layers": 4,
            "sliding_window": 24,
        },
    ),
}
