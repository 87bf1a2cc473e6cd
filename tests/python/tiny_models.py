"""Random tiny checkpoints of every architecture, made and saved by transformers, and its logits for them."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import published_layouts
import safetensors.torch
import tiny_dense
import torch
import transformers
from numpy.typing import NDArray
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward  # Llama's, and a softcap
from transformers.pytorch_utils import Conv1D

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = SIZES["num_hidden_layers"]
# Overrides of defaults that are those of a large model.
GEMMA = {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}
OLMO_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "pad_token_id": 0}
SIGMOID_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
GRANITE = {
    "embedding_multiplier": 7.3,
    "attention_multiplier": 0.21,
    "residual_multiplier": 0.37,
    "logits_scaling": 2.7,
}
# Attention over latents, and experts in all layers but the first.
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
# The same attention, without experts.
DENSE_LATENTS = {key: size for key, size in LATENTS.items() if key.endswith(("_rank", "_head_dim", "value_heads"))}
# Attention to the tokens that indexers select, fewer than most positions see. With few heads, scores that are exactly 0
# tie at the threshold, where torch chooses any of them.
SPARSE_LATENTS = LATENTS | {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 32}
# Windows, and entries of 4 tokens, of which indexers choose some, and of 32; experts by token in the first layer.
DEEPSEEK_V4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 32},
    "sliding_window": 24,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "routed_scaling_factor": 1.7,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "DeepseekV32": SPARSE_LATENTS | {"n_group": 4, "topk_group": 2},
    "GlmMoeDsa": SPARSE_LATENTS,
    "DeepseekV4": DEEPSEEK_V4,
    "DeepseekV2": LATENTS,
    "DeepseekV3": LATENTS | {"n_group": 4, "topk_group": 2},
    "Qwen3Moe": EXPERTS | {"norm_topk_prob": True},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "Mixtral": LOCAL_EXPERTS,
    "Glm4Moe": {
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.7,
    },
    "Llama4": LOCAL_EXPERTS
    | {
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "intermediate_size_mlp": 80,
        "attention_chunk_size": 40,
        "no_rope_layer_interval": 3,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "GptOss": LOCAL_EXPERTS
    | {
        "head_dim": 16,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "Glm4MoeLite": {key: value for key, value in LATENTS.items() if key != "first_k_dense_replace"},
    "MiniMaxM2": LOCAL_EXPERTS
    | {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24},
    "Olmoe": OLMO_EXPERTS,
    "FlexOlmo": OLMO_EXPERTS,
    "GraniteMoe": LOCAL_EXPERTS | GRANITE,
    "GraniteMoeShared": LOCAL_EXPERTS | GRANITE | {"shared_intermediate_size": 40},
    "Dots1": SIGMOID_EXPERTS | {"first_k_dense_replace": 1, "norm_topk_prob": True},
    "SolarOpen": SIGMOID_EXPERTS | {"head_dim": 32},
    "ExaoneMoe": EXPERTS | {"num_shared_experts": 2, "sliding_window": 24, "sliding_window_pattern": 2},
    "Afmoe": EXPERTS
    | {
        "head_dim": 16,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "sliding_window": 24,
        "global_attn_every_n_layers": 2,
        "mup_enabled": True,
        "route_scale": 1.7,
    },
    "HunYuanMoEV1": {
        "intermediate_size": 32,
        "num_experts": 8,
        "moe_topk": 3,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    },
    "Mistral4": LATENTS
    | {
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "MiMoV2Flash": {key: size for key, size in SIGMOID_EXPERTS.items() if key != "n_shared_experts"}
    | {
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 1,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "Step3p5": {
        **{
            key: value
            for key, value in SIGMOID_EXPERTS.items()
            if key not in ("n_shared_experts", "routed_scaling_factor")
        },
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_sliding_attention_heads": 6,
        "share_expert_dim": 40,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limits": [0, None, 1.0, 0.5],
        "swiglu_limits_shared": [0.7, 0, None, 0.5],
        "moe_router_scaling_factor": 1.7,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "Laguna": EXPERTS
    | {
        "head_dim": 16,
        "num_attention_heads_per_layer": [4, 6, 4],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "shared_expert_intermediate_size": 40,
        "moe_routed_scaling_factor": 1.7,
        "moe_router_logit_softcapping": 2.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "Mellum": EXPERTS
    | {
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "HYV3": EXPERTS | {"head_dim": 16, "num_shared_experts": 2, "router_scaling_factor": 1.7},
    "Cohere2Moe": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 80,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 24,
        "logit_scale": 0.4,
        "rms_norm_eps": None,
    },
    "GraniteMoeSWA": LOCAL_EXPERTS
    | GRANITE
    | {
        "num_hidden_layers": 4,
        "shared_intermediate_size": 40,
        "sliding_window": 24,
        "layer_rope_theta": [1e4, 0, 5e5, 1e4],
    },
    "AXK1": LATENTS | {"n_group": 4, "topk_group": 2},
    "Phimoe": LOCAL_EXPERTS | {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3},
    # Tokens for padding are beyond the vocabulary by default.
    "Phi3": {"pad_token_id": 0},
    "Olmo2": {"pad_token_id": 0},
    "Olmo3": {
        "pad_token_id": 0,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "Granite": GRANITE,
    "SmolLM3": {"pad_token_id": 0, "no_rope_layer_interval": 2},
    "Glm": {"pad_token_id": 0, "head_dim": 16},
    "Glm4": {"pad_token_id": 0, "head_dim": 16},
    "Ministral": {
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Ministral3": {
        "pad_token_id": 0,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "Gemma": {"head_dim": 32, "pad_token_id": 0},
    "SeedOss": {"head_dim": 16, "pad_token_id": 0},
    "Ernie4_5": {"head_dim": 16},
    "Exaone4": {"num_hidden_layers": 4, "sliding_window": 24},
    "Youtu": DENSE_LATENTS,
    "HunYuanDenseV1": {
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    },
    "Cohere": {"pad_token_id": 0, "logit_scale": 0.4},
    "Cohere2": {"pad_token_id": 0, "logit_scale": 0.4, "num_hidden_layers": 4, "sliding_window": 24},
    "Nemotron": {"head_dim": 16},
    "Cwm": {
        "head_dim": 16,
        "sliding_window": 24,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "HyperCLOVAX": {
        "embedding_multiplier": 7.3,
        "attention_multiplier": 0.21,
        "residual_multiplier": 0.37,
        "logits_scaling": 0.4,
    },
    "Gemma2": GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 1.0},
    "Gemma3": GEMMA
    | {
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 1.0,
}
SETTINGS |= tiny_dense.SETTINGS
SETTINGS["Gemma4"] = GEMMA4
SETTINGS["Gemma4Unified"] = {key: value for key, value in GEMMA4.items() if "per_layer_input" not in key}
GATED_DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "norm_eps": 1e-5,
    "block_multiple_of": 16,
    "conv_L_cache": 3,
    "tie_word_embeddings": False,
}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 40}
SETTINGS |= {
    "Qwen3Next": GATED_DELTA_NET | SHARED_EXPERT,
    "Qwen3_5": GATED_DELTA_NET,
    "Qwen3_5Moe": GATED_DELTA_NET | SHARED_EXPERT,
    "Lfm2": LFM2,
    "Lfm2Moe": LFM2 | EXPERTS | {"num_dense_layers": 2},
}
MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "pad_token_id": 0,
}
FALCON_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.9, 0.3],
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.7, 0.8, 1.2, 1.3, 0.6],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
SETTINGS |= {
    "GraniteMoeHybrid": MAMBA2 | LOCAL_EXPERTS | GRANITE | {"shared_intermediate_size": 40},
    "Bamba": {key: value for key, value in MAMBA2.items() if key != "layer_types"} | {"attn_layer_indices": [1]},
    "FalconH1": {key: value for key, value in MAMBA2.items() if key != "layer_types"}
    | {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
    }
    | FALCON_FACTORS,
    "NemotronH": {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "time_step_min": 0.4,
        "pad_token_id": 0,
    },
}
# Layers of experts in place of those of one MLP.
NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
KIMI_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "linear_head_dim": 24,
    "linear_num_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "pad_token_id": 0,
}
SETTINGS["KimiLinear"] = KIMI_LINEAR
SETTINGS["BailingHybrid"] = {
    key: size for key, size in KIMI_LINEAR.items() if key not in ("linear_head_dim", "linear_num_heads")
} | {"head_dim": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Gemma4": "Gemma4TextConfig",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Llama4": "Llama4TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
PEAKED = ("q_proj", "q_b_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn")  # parts of names
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")  # buffers
FIRST = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Gemma4", "Gemma4Unified"]
HYBRIDS = [
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
    "Lfm2",
    "Lfm2Moe",
    "GraniteMoeHybrid",
    "Bamba",
    "FalconH1",
    "NemotronH",
    "KimiLinear",
    "BailingHybrid",
]
DENSE = [
    *("Phi3", "Olmo2", "Olmo3", "Granite", "SmolLM3", "Glm", "Glm4", "Ministral", "Ministral3", "SeedOss", "Ernie4_5"),
    *("Exaone4", "HunYuanDenseV1", "Cwm", "HyperCLOVAX", "Cohere", "Cohere2", "Arcee", "Nemotron", "StableLm"),
    *tiny_dense.ARCHITECTURES,
]
WITH_EXPERTS = [
    *("Qwen3Moe", "Mixtral", "Qwen2Moe", "GptOss", "Glm4Moe", "Llama4", "Glm4MoeLite", "MiniMaxM2", "Ernie4_5_Moe"),
    *("Olmoe", "FlexOlmo", "GraniteMoe", "GraniteMoeShared", "Dots1", "SolarOpen", "ExaoneMoe"),
    *(
        "Afmoe",
        "HunYuanMoEV1",
        "Mistral4",
        "Phimoe",
        "MiMoV2Flash",
        "Step3p5",
        "Laguna",
        "Mellum",
        "HYV3",
        "Cohere2Moe",
    ),
    *("GraniteMoeSWA", "AXK1"),
]


def make_model(architecture: str, seed: int = 0, **settings: Any) -> transformers.PreTrainedModel:
    """A model whose every part matters: attention is peaked, norms differ from one, biases from zero."""
    layout = published_layouts.LAYOUTS.get(architecture)
    base = layout.base if layout else architecture
    if base == "Step3p7":
        return _make_step(architecture, seed, settings)
    if architecture == "MiniCPM":  # its attention has no factor of its own
        all_settings = SIZES | settings
        head_dim = settings.get("head_dim") or all_settings["hidden_size"] // all_settings["num_attention_heads"]
        settings = {**settings, "attention_multiplier": head_dim**-0.5}
    settings = tiny_dense.own_keys(architecture, {**SIZES, **SETTINGS.get(architecture, {}), **settings})
    model = fill(class_of(base)(config_class_of(base)(**copy.deepcopy(settings))), seed)
    if layout:
        model.published_layout = architecture
    return model


def _make_step(architecture: str, seed: int, settings: dict[str, Any]) -> transformers.PreTrainedModel:
    """Step 3.7, or its language model in the layout of Step 3.5."""
    text = {key: value for key, value in SIZES.items() if key != "bos_token_id"}
    text = copy.deepcopy({**text, **SETTINGS["Step3p5"], **settings})
    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Step3p7Config(text_config=text, vision_config=vision)
    model = fill(transformers.Step3p7ForConditionalGeneration(config), seed)
    if architecture == "Step3p5":
        model.published_layout = architecture
    return model


def config_class_of(architecture: str) -> Any:
    return getattr(transformers, CONFIGS.get(architecture, f"{architecture}Config"))


def class_of(architecture: str) -> Any:
    return getattr(transformers, tiny_dense.CLASSES.get(architecture, f"{architecture}ForCausalLM"))


def fill(model: transformers.PreTrainedModel, seed: int = 0) -> transformers.PreTrainedModel:
    """Random values for its parameters, for attention without fused kernels."""
    model.config._attn_implementation = "eager"
    # To the weights of norms.
    adds_one = ("GemmaFor", "Gemma2", "Gemma3", "VaultGemma", "Qwen3Next", "Qwen3_5", "NemotronFor", "Step3p7")
    norm_center = 0 if type(model).__name__.startswith(adds_one) else 1
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 3)  # so that a state remembers dozens of tokens
            elif "norm" in name or ".ln_" in name or name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(norm_center + 0.3 * noise)
                if type(model).__name__.startswith("Gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.mul_(0.5)  # its attention has no scale
            elif name.endswith("e_score_correction_bias"):
                parameter.copy_(0.1 * noise)  # small next to the scores of a softmax
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(noise)
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                parameter.copy_(2.0 * noise / parameter.shape[-1] ** 0.5)  # so that an expert more or less matters
            elif "embed_tokens" in name:
                parameter.copy_(0.05 * noise)  # small, so that the norms' eps matters in the first block
            elif "lm_head" in name:
                parameter.copy_(0.3 * noise)
            else:
                gain = 2.0 if any(part in name for part in PEAKED) else 1.0
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(CORRECTION_BIASES):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("tid2eid"):
                scores = torch.rand((buffer.shape[0], model.config.n_routed_experts), generator=generator)
                buffer.copy_(scores.argsort(-1)[:, : buffer.shape[1]])
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.1 * torch.randn(buffer.shape, generator=generator))
    model.train(False)
    return model


def load(folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    layout = published_layouts.layout_of(json.loads((folder / "config.json").read_text())["architectures"][0])
    if layout:
        with tempfile.TemporaryDirectory() as temporary:
            copied = shutil.copytree(folder, Path(temporary) / "model")
            published_layouts.unpublish(copied, layout)
            return load(copied, dtype)
    # transformers' table of language models lacks these.
    own = {"mistral4": "Mistral4ForCausalLM", "step3p7": tiny_dense.CLASSES["Step3p7"]}
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    model_class: Any = getattr(transformers, own.get(model_type, "AutoModelForCausalLM"))
    model: transformers.PreTrainedModel = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model


def save(model: transformers.PreTrainedModel, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Saves in `dtype`, and leaves in `model` the values that were saved (to(dtype) would round rope's buffers too)."""
    stored: Any = copy.deepcopy(model)  # transformers declares to() without its arguments
    stored.to(dtype).save_pretrained(folder, **options)
    if type(model).__name__.startswith("Kimi"):
        _rename_blocks(folder / "model.safetensors")
    if hasattr(model, "published_layout"):
        published_layouts.publish(folder, model.published_layout)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith(CORRECTION_BIASES)]
    with torch.no_grad():
        for parameter in [*model.parameters(), *biases]:
            parameter.copy_(parameter.to(dtype))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(buffer.to(dtype))


def _rename_blocks(file: Path) -> None:
    """transformers saves the layers of Kimi K2.5 under the name that its encoder of images has for its own."""
    tensors = safetensors.torch.load_file(file)
    renamed = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensors[name] for name in tensors
    }
    safetensors.torch.save_file(renamed, file, metadata={"format": "pt"})


def expected_logits(model: transformers.PreTrainedModel, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    result: NDArray[np.float32] = logits.float().numpy()
    return result


def rounded_logits(
    model: transformers.PreTrainedModel, tokens: NDArray[np.int32], inputs: torch.dtype, cache: torch.dtype
) -> NDArray[np.float32]:
    """The same in float32, but with the inputs of linear layers and K and V rounded, as the engine rounds them."""

    def attend(module, query, key, value, *arguments, **others):  # type: ignore[no-untyped-def]
        if not hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = 1
        return eager_attention_forward(
            module, query, key.to(cache).float(), value.to(cache).float(), *arguments, **others
        )

    transformers.AttentionInterface.register("rounded", attend)
    transformers.AttentionMaskInterface.register("rounded", eager_mask)
    model.config._attn_implementation = "rounded"
    linear = [module for module in model.modules() if isinstance(module, (torch.nn.Linear, Conv1D))]
    hooks = [module.register_forward_pre_hook(lambda _, x: (x[0].to(inputs).float(),)) for module in linear]
    try:
        return expected_logits(model, tokens)
    finally:
        model.config._attn_implementation = "eager"
        for hook in hooks:
            hook.remove()


def edit_config(folder: Path, **changes: Any) -> None:
    """Changes keys of config.json; ... removes one; keys of an object inside are given as "outer.inner"."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        *outer, last = key.split(".")
        target = config
        for name in outer:
            target = target[name]
        if value is ...:
            target.pop(last, None)
        else:
            target[last] = value
    path.write_text(json.dumps(config))


def as_first_generation(folder: Path) -> None:
    """Rewrites config.json as transformers 4 wrote it."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": config.pop("rope_theta", None)}
    if "sliding_attention" in rope:  # Gemma 3, OLMo 3
        if config["model_type"] != "olmo3":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if config["model_type"] == "gpt_neox":
        config["rotary_pct"] = config.pop("partial_rotary_factor")
        config["rotary_emb_base"] = config.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    kept = ("ministral", "olmo3", "exaone4", "cwm", "cohere2", "granite_swa", "vaultgemma")
    if config["model_type"] not in kept:
        config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
