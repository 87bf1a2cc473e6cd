"""Logits of checkpoints whose config.json leaves out keys, against transformers: its classes' defaults count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_classes
import tiny_models
import tiny_multimodal
import tiny_text_and_images
import tolerance
import torch
import transformers
from logits_oracle import TOKENS, largest_error, logits
from published_layouts import LAYOUTS
from tiny_text_and_images import make_glm4v, make_omni_thinker

ARCHITECTURES = [
    *tiny_models.FIRST,
    *("DeepseekV2", "DeepseekV3", "DeepseekV32", "DeepseekV4", "GlmMoeDsa", "Youtu"),
    *(name for name in [*tiny_models.DENSE, *tiny_models.WITH_EXPERTS] if name not in LAYOUTS),
    *tiny_models.HYBRIDS,
]
KEPT = {"architectures", "model_type", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}


def shapes(architecture: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the parameters; None where transformers refuses the config."""
    config_class = tiny_models.config_class_of(architecture)
    try:
        with torch.device("meta"):
            model = tiny_models.class_of(architecture)(config_class(**config))
    except Exception:
        return None
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shortest_config(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that transformers needs for no shape of a parameter."""
    expected = shapes(architecture, config)
    assert expected is not None
    for key in sorted(config.keys() - KEPT):
        shorter = {name: value for name, value in config.items() if name != key}
        if shapes(architecture, shorter) == expected:
            config = shorter
    return config


@pytest.mark.rotation("architecture", 3, 0)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_absent_keys_are_the_defaults_of_transformers(architecture: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("time_step_limit", None)  # with an infinity that only from_pretrained reads
    # Some defaults are those of large models, and the engine needs to be told the others.
    kept = {"num_hidden_layers", "vocab_size", "max_position_embeddings", "layer_types", "num_experts_per_tok"}
    kept |= {"intermediate_size", "n_group", "topk_group", "num_key_value_heads", "rotary_dim"}
    kept |= {"num_experts_per_token", "num_expert_group"}
    if "num_key_value_heads" not in config:  # the number of heads is in no shape
        kept |= {"num_attention_heads", "n_head"}
    shortest = shortest_config(architecture, config)
    shortest |= {key: config[key] for key in kept & config.keys()}
    assert "rms_norm_eps" not in shortest
    config_class = tiny_models.config_class_of(architecture)
    model = tiny_models.fill(tiny_models.class_of(architecture)(config_class(**shortest)))
    tiny_models.save(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(shortest))
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


MULTIMODAL: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "mistral": lambda: tiny_multimodal.make_mistral3(
        "Mistral", num_attention_heads=32, num_key_value_heads=8, head_dim=16
    ),
    "ministral3": lambda: tiny_multimodal.make_mistral3("Ministral3", num_attention_heads=32, num_key_value_heads=8),
    "gemma3": lambda: tiny_multimodal.make_gemma3_multimodal(num_attention_heads=8, num_key_value_heads=4),
    "llama4": lambda: tiny_multimodal.make_llama4_multimodal(num_attention_heads=40, num_key_value_heads=8),
    "glm4v": lambda: make_glm4v("Glm4v", num_attention_heads=32, num_key_value_heads=2, hidden_size=512),
    "glm4v_moe": lambda: make_glm4v("Glm4vMoe", num_attention_heads=96, num_key_value_heads=8),
    "llava": lambda: tiny_text_and_images.make("Llava", num_attention_heads=32, num_key_value_heads=32, head_dim=16),
    "internvl": lambda: tiny_text_and_images.make(
        "InternVL", num_attention_heads=32, num_key_value_heads=32, head_dim=16
    ),
    "kimi_k25": lambda: tiny_text_and_images.make("Kimi_K25", num_attention_heads=128, num_key_value_heads=128),
    "mistral4": lambda: tiny_multimodal.make_mistral3("Mistral4", num_attention_heads=32, num_key_value_heads=32),
    "qwen2_5_omni": lambda: make_omni_thinker(
        "Qwen2_5Omni", num_attention_heads=28, num_key_value_heads=4, head_dim=16, hidden_size=448
    ),
    "qwen3_omni": lambda: make_omni_thinker("Qwen3OmniMoe", num_attention_heads=28, num_key_value_heads=4),
    "qwen3_vl_moe": lambda: tiny_classes.make_qwen3_vl_moe(num_attention_heads=16, num_key_value_heads=16),
    "qwen2_5_vl": lambda: tiny_multimodal.make_qwen_vl(
        "Qwen2_5_VL", num_attention_heads=64, num_key_value_heads=8, head_dim=8, hidden_size=512, num_hidden_layers=1
    ),
    "qwen3_vl": lambda: tiny_multimodal.make_qwen_vl(
        "Qwen3VL", num_attention_heads=32, num_key_value_heads=32, head_dim=16
    ),
    "qwen3_5": lambda: tiny_multimodal.make_qwen35_multimodal(False, num_attention_heads=16, num_key_value_heads=4),
}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_sizes_that_a_text_config_leaves_out(name: str, tmp_path: Path) -> None:
    """transformers 4 wrote only those that are not the class's defaults."""
    model = MULTIMODAL[name]()
    tiny_models.save(model, tmp_path)
    tiny_models.edit_config(
        tmp_path, **{f"text_config.{key}": ... for key in ("num_attention_heads", "num_key_value_heads", "hidden_act")}
    )
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
