"""A tiny random model of each class that src/models/models.cc lists, by its name in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tiny_models
import tiny_multimodal
import transformers
from published_layouts import layout_of


def make_qwen3_vl_moe(**settings: Any) -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {**tiny_models.SIZES, **tiny_models.EXPERTS, "head_dim": 32, "rope_parameters": rope, **settings}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    }
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return tiny_models.fill(transformers.Qwen3VLMoeForConditionalGeneration(config))


def make_glm4v_moe(**settings: Any) -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    experts = {**tiny_models.SIGMOID_EXPERTS, "first_k_dense_replace": 1}
    text = {**tiny_models.SIZES, **experts, "head_dim": 32, "rope_parameters": rope, **settings}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "out_hidden_size": text["hidden_size"],
    }
    config = transformers.Glm4vMoeConfig(text_config=text, vision_config=vision)
    return tiny_models.fill(transformers.Glm4vMoeForConditionalGeneration(config))


MULTIMODAL: dict[str, Callable[..., transformers.PreTrainedModel]] = {
    "Gemma3": tiny_multimodal.make_gemma3_multimodal,
    "Gemma4": tiny_multimodal.make_gemma4_multimodal,
    "Gemma4Unified": tiny_multimodal.make_gemma4_unified_multimodal,
    "Mistral3": partial(tiny_multimodal.make_mistral3, "Ministral3"),
    "Llama4": tiny_multimodal.make_llama4_multimodal,
    "Glm4vMoe": make_glm4v_moe,
    "Qwen3VLMoe": make_qwen3_vl_moe,
    "Qwen3_5": partial(tiny_multimodal.make_qwen35_multimodal, False),
    "Qwen3_5Moe": partial(tiny_multimodal.make_qwen35_multimodal, True),
    **{name: partial(tiny_multimodal.make_qwen_vl, name) for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")},
}


# Sizes that fill the panels of packed weights and the groups of quantized ones, of architectures of all kinds: a class
# ignores the others' keys.
WHOLE_GROUPS: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "global_head_dim": 64,
    "intermediate_size": 192,
    "intermediate_size_mlp": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_d_state": 32,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
}


def experts(count: int, chosen: int) -> dict[str, int]:
    """Numbers of experts under the names that the classes have for them."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return {**dict.fromkeys(names, count), "num_experts_per_tok": chosen, "moe_k": chosen}


def make_of_class(name: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model of a class of config.json's "architectures", in WHOLE_GROUPS; `settings` of its language model."""
    settings = {**WHOLE_GROUPS, **settings}
    if name.startswith(("Deepseek", "Glm4MoeLite", "Youtu")):
        settings["head_dim"] = settings["qk_rope_head_dim"]  # so transformers names the rotated part
    if name.startswith(("GraniteMoeShared", "GraniteMoeHybrid")):
        settings["shared_intermediate_size"] = 64  # MiniMax-M2 has a key of this name, which must be 0
    if layout := layout_of(name):
        return tiny_models.make_model(layout, **settings)
    if name.endswith("ForConditionalGeneration"):
        return MULTIMODAL[name.removesuffix("ForConditionalGeneration")](**settings)
    return tiny_models.make_model(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel"), **settings)
