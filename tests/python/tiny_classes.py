"""A tiny random model of each class that src/models/models.cc lists, by its name in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tiny_models
import tiny_multimodal
import tiny_text_and_images
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


MULTIMODAL: dict[str, Callable[..., transformers.PreTrainedModel]] = {
    "Gemma3": tiny_multimodal.make_gemma3_multimodal,
    "Gemma4": tiny_multimodal.make_gemma4_multimodal,
    "Gemma4Unified": tiny_multimodal.make_gemma4_unified_multimodal,
    "Mistral3": partial(tiny_multimodal.make_mistral3, "Ministral3"),
    "MistralLarge4": tiny_multimodal.make_mistral_large4,
    "Llama4": tiny_multimodal.make_llama4_multimodal,
    **{name: partial(tiny_text_and_images.make_glm4v, name) for name in ("Glm4v", "Glm46V", "Glm4vMoe")},
    "Qwen3VLMoe": make_qwen3_vl_moe,
    "Qwen3_5": partial(tiny_multimodal.make_qwen35_multimodal, False),
    "Qwen3_5Moe": partial(tiny_multimodal.make_qwen35_multimodal, True),
    **{name: partial(tiny_multimodal.make_qwen_vl, name) for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")},
    **{
        f"{name}Thinker": partial(tiny_text_and_images.make_omni_thinker, name)
        for name in ("Qwen2_5Omni", "Qwen3OmniMoe")
    },
    "Step3p7": partial(tiny_models.make_model, "Step3p7"),
    **{name: partial(tiny_text_and_images.make, name) for name in tiny_text_and_images.CLASSES},
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
    "share_expert_dim": 64,
    "prefix_dense_intermediate_size": 192,
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
    "index_head_dim": 64,
    "index_n_heads": 16,
    "index_topk": 64,  # most tokens: rounding changes which of the others are selected
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_head_dim": 64,
    "linear_num_heads": 8,
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
    if name.startswith("DeepseekV4"):
        settings["o_lora_rank"] = 64
    elif name.startswith(("AXK1", "Deepseek", "Glm4MoeLite", "GlmMoeDsa", "Kimi_K25", "KimiK25", "Youtu")):
        settings["head_dim"] = settings["qk_rope_head_dim"]  # so transformers names the rotated part
    if name.startswith(("GraniteMoeShared", "GraniteMoeHybrid", "GraniteMoeSWA")):
        settings["shared_intermediate_size"] = 64  # MiniMax-M2 has a key of this name, which must be 0
    if name.startswith("HunYuanMoE"):
        del settings["moe_intermediate_size"]  # the experts have intermediate_size
    if name.startswith("HunYuanMoE") and "num_experts" in settings:
        settings |= {"moe_topk": settings["num_experts_per_tok"], "num_local_experts": settings["num_experts"]}
    if name.startswith("MiMo"):
        settings |= {"v_head_dim": settings["head_dim"] // 2, "n_shared_experts": None}
    if name.startswith("Mistral4"):
        settings["head_dim"] = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    if name.startswith("Phimoe"):  # two experts, and no jumps of their weights
        settings |= {"num_local_experts": 2, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
    if layout := layout_of(name):
        return tiny_models.make_model(layout, **settings)
    if name.endswith("ForConditionalGeneration"):
        return MULTIMODAL[name.removesuffix("ForConditionalGeneration")](**settings)
    return tiny_models.make_model(name.removesuffix("ForCausalLM").removesuffix("LMHeadModel"), **settings)
