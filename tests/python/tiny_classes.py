"""A tiny random model of each class that src/models/models.cc lists, by its name in config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tiny_models
import transformers

MULTIMODAL: dict[str, Callable[..., transformers.PreTrainedModel]] = {
    "Gemma3": tiny_models.make_gemma3_multimodal,
    "Mistral3": partial(tiny_models.make_mistral3, "Ministral3"),
    "Llama4": tiny_models.make_llama4_multimodal,
    "Qwen3_5": partial(tiny_models.make_qwen35_multimodal, False),
    "Qwen3_5Moe": partial(tiny_models.make_qwen35_multimodal, True),
}


# Sizes that fill the panels of packed weights and the groups of quantized ones, of architectures of all kinds: a class
# ignores the others' keys.
WHOLE_GROUPS: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 192,
    "intermediate_size_mlp": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
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
}


def experts(count: int, chosen: int) -> dict[str, int]:
    """Numbers of experts under the names that the classes have for them."""
    return {"num_experts": count, "num_local_experts": count, "n_routed_experts": count, "num_experts_per_tok": chosen}


def make_of_class(name: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model of a class of config.json's "architectures", in WHOLE_GROUPS; `settings` of its language model."""
    settings = {**WHOLE_GROUPS, **settings}
    if name.startswith("Deepseek"):
        settings["head_dim"] = settings["qk_rope_head_dim"]  # so transformers names the rotated part
    if name.endswith("ForConditionalGeneration"):
        return MULTIMODAL[name.removesuffix("ForConditionalGeneration")](**settings)
    return tiny_models.make_model(name.removesuffix("ForCausalLM"), **settings)
