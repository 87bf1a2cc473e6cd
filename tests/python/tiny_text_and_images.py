"""Random tiny checkpoints of text and images whose language model is another class (src/models/.../multimodal.cc)."""

from __future__ import annotations

from typing import Any

import tiny_models
import transformers

_ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_CLIP = {**_ENCODER, "model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = {**_ENCODER, "model_type": "siglip_vision_model"}
# By class: the class of the language model, the encoder of images, other keys.
CLASSES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "AyaVision": ("Cohere2", _SIGLIP, {"tie_word_embeddings": False}),
    "Cohere2Vision": (
        "Cohere2",
        _SIGLIP,
        {"alignment_intermediate_size": 16, "tie_word_embeddings": False},
    ),
    "Exaone4_5_": (
        "Exaone4",
        {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "num_key_value_heads": 2}
        | {"patch_size": 4, "fullatt_block_indexes": [0]},
        {},
    ),
    "Idefics3": ("Llama", _ENCODER, {}),
    "InternVL": (
        "Qwen2",
        {**_ENCODER, "image_size": [28, 28], "patch_size": [14, 14]},
        {"tie_word_embeddings": False},
    ),
    "Kimi_K25": (
        "DeepseekV3",
        {key: size for key, size in _ENCODER.items() if key != "image_size"}
        | {"patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        {"projection_hidden_size": 16, "tie_word_embeddings": False},
    ),
    "Lfm2Vl": (
        "Lfm2",
        {**_ENCODER, "model_type": "siglip2_vision_model", "num_patches": 4},
        {"projector_hidden_size": 16, "tie_word_embeddings": False},
    ),
    "Llava": ("Llama", _CLIP, {}),
    "LlavaNext": ("Mistral", _CLIP, {}),
    "LlavaOnevision": ("Qwen2", _SIGLIP, {}),
    "SmolVLM": ("Llama", _ENCODER, {}),
}


# The classes' output matrix is applied alone, where a language model's own class also scales or caps the logits.
_PLAIN_LOGITS = {"logit_scale": 1.0, "final_logit_softcapping": None}


def make(name: str, text: str = "", **settings: Any) -> transformers.PreTrainedModel:
    """A model of the class `name`, with `settings` of its language model, of the class `text` if that is given."""
    default, vision, others = CLASSES[name]
    text = text or default
    model_type = getattr(transformers, f"{text}Config").model_type
    own = tiny_models.SETTINGS.get(text, {})
    plain = {key: value for key, value in _PLAIN_LOGITS.items() if key in own}
    language = {**tiny_models.SIZES, **own, **plain, **settings, "model_type": model_type}
    if name == "Exaone4_5_":
        vision = {**vision, "out_hidden_size": language["hidden_size"]}
    config = getattr(transformers, f"{name}Config")(text_config=language, vision_config=vision, **others)
    return tiny_models.fill(getattr(transformers, f"{name}ForConditionalGeneration")(config))


def make_glm4v(name: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model of the class `name`: "Glm4v", "Glm46V" or "Glm4vMoe"."""
    with_experts = name == "Glm4vMoe"
    head_dim = 32 if with_experts else 16
    text = {**tiny_models.SIZES, "head_dim": head_dim, **settings}
    rotated = text["head_dim"] // 4
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    text["rope_parameters"] = {**rope, "mrope_section": [rotated - 2, 1, 1]}
    if with_experts:
        text = {**tiny_models.SIGMOID_EXPERTS, "first_k_dense_replace": 1, **text}
    else:
        del text["head_dim"]  # the class has none
        text |= {"model_type": "glm4v_text", "pad_token_id": 0}
    vision = {
        "model_type": "glm4v_moe_vision" if with_experts else "glm4v_vision",
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "out_hidden_size": text["hidden_size"],
    }
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    return tiny_models.fill(getattr(transformers, f"{name}ForConditionalGeneration")(config))


def make_omni_thinker(name: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model of the class `name`: "Qwen2_5Omni" or "Qwen3OmniMoe"."""
    with_experts = name == "Qwen3OmniMoe"
    text = {**tiny_models.SIZES, "head_dim": 16, **(tiny_models.EXPERTS if with_experts else {}), **settings}
    sections = text["head_dim"] // 2 - 4  # of the three positions
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [sections, 2, 2]}
    if not with_experts:
        del text["head_dim"]
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [0],
        "deepstack_visual_indexes": [],
        "num_position_embeddings": 16,
    }
    audio = {
        "d_model": 16,
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "output_dim": text["hidden_size"],
        "downsample_hidden_size": 16,
    }
    config = getattr(transformers, f"{name}ThinkerConfig")(
        text_config=text, vision_config=vision, audio_config=audio, tie_word_embeddings=False
    )
    return tiny_models.fill(getattr(transformers, f"{name}ThinkerForConditionalGeneration")(config))
