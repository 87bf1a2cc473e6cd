"""Random tiny checkpoints of text and vision; their language models have the sizes of tiny_models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers


def make_gemma3_multimodal(**settings: Any) -> transformers.PreTrainedModel:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**tiny_models.SIZES, **tiny_models.SETTINGS["Gemma3"], **settings}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return tiny_models.fill(transformers.Gemma3ForConditionalGeneration(config))


def make_gemma4_multimodal(**settings: Any) -> transformers.PreTrainedModel:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "position_embedding_size": 16}
    text = {**tiny_models.SIZES, **tiny_models.GEMMA4, **settings}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    return tiny_models.fill(transformers.Gemma4ForConditionalGeneration(config))


def make_gemma4_unified_multimodal(**settings: Any) -> transformers.PreTrainedModel:
    text = {**tiny_models.SIZES, **tiny_models.SETTINGS["Gemma4Unified"], **settings}
    vision = {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": text["hidden_size"]}
    config = transformers.Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None)
    return tiny_models.fill(transformers.Gemma4UnifiedForConditionalGeneration(config))


def make_mistral3(text: str, **settings: Any) -> transformers.PreTrainedModel:
    """With a language model of the class `text`, "Mistral" or "Ministral3"."""
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
        "image_size": 28,
        "patch_size": 14,
    }
    language = {**tiny_models.SIZES, **tiny_models.SETTINGS.get(text, {}), **settings, "model_type": text.lower()}
    if text == "Mistral":
        language["sliding_window"] = None
    config = transformers.Mistral3Config(text_config=language, vision_config=vision, tie_word_embeddings=False)
    return tiny_models.fill(transformers.Mistral3ForConditionalGeneration(config))


# Some tokens have more than index_topk before them; layers 0 and 2 have a rope.
MISTRAL_LARGE4: dict[str, Any] = {
    **{key: value for key, value in tiny_models.SPARSE_LATENTS.items() if key != "q_lora_rank"},
    "no_rope_layers": [1, 0, 1],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    },
}


def make_mistral_large4(**settings: Any) -> transformers.PreTrainedModel:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {**tiny_models.SIZES, **MISTRAL_LARGE4, **settings}
    config = transformers.MistralLarge4Config(text_config=text, vision_config=vision)
    model: Any = tiny_models.fill(transformers.MistralLarge4ForConditionalGeneration(config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # queries that grow by the logarithm of the position
            if name.endswith(("softmax_scaling.scale", "softmax_scaling.bias")):
                center = 0.2 if name.endswith("scale") else 1.0
                parameter.copy_(center + 0.2 * torch.randn(parameter.shape, generator=generator))
        alpha = model.model.language_model.rotary_emb.alpha
        alpha.copy_(0.5 * torch.randn(alpha.shape, generator=generator))
    return model


def make_llama4_multimodal(**settings: Any) -> transformers.PreTrainedModel:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 16,
        "projector_input_dim": 16,
        "projector_output_dim": 16,
    }
    text = {**tiny_models.SIZES, **tiny_models.SETTINGS["Llama4"], **settings}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return tiny_models.fill(transformers.Llama4ForConditionalGeneration(config))


def make_qwen35_multimodal(with_experts: bool, **settings: Any) -> transformers.PreTrainedModel:
    name = "Qwen3_5Moe" if with_experts else "Qwen3_5"
    text = {**tiny_models.SIZES, **tiny_models.SETTINGS[name], **settings}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    return tiny_models.fill(getattr(transformers, f"{name}ForConditionalGeneration")(config))


def make_qwen_vl(name: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model of the class `name`: "Qwen2VL", "Qwen2_5_VL" or "Qwen3VL"."""
    text = {**tiny_models.SIZES, "head_dim": 16, **settings}
    sections = text["head_dim"] // 2 - 4  # of the three positions
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [sections, 2, 2]}
    text["rope_parameters"] = {**rope, **text.get("rope_parameters", {})}
    if name != "Qwen3VL":  # the only one whose heads have a separate size
        del text["head_dim"]
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "embed_dim": 32,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "fullatt_block_indexes": [0],
        "deepstack_visual_indexes": [0],
    }
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    return tiny_models.fill(getattr(transformers, f"{name}ForConditionalGeneration")(config))


def load_multimodal(folder: Path) -> transformers.PreTrainedModel:
    model: transformers.PreTrainedModel = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model
