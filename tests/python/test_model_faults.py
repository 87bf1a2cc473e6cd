"""Faults in checkpoints that the comparison with transformers must notice, and checkpoints that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import tolerance
import torch
from logits_oracle import Fault, assert_noticed, edit_config, edit_tensor, logits
from test_models_oracle import LATENTS, PARTIAL_LONG_ROPE, ROPES, SIXTEEN_BITS, errors_in_16_bits

import kvanta

# --- The power of the comparison: one fault in the checkpoint that Kvanta reads, and it must fail. ---


def swapped_heads(weight: torch.Tensor) -> torch.Tensor:
    heads = weight.reshape(-1, 16, weight.shape[1]).clone()
    heads[[0, 1]] = heads[[1, 0]]
    return heads.flatten(0, 1)


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Channels in the order of the other rope convention: (0, 1), (2, 3), ... are the pairs."""
    return weight.reshape(-1, 2, 8, weight.shape[1]).transpose(1, 2).flatten(0, 2)


ATTENTION = "model.layers.1.self_attn."
FAULTS: dict[str, Fault] = {
    "rope_theta": ("Llama", {}, edit_config(**{"rope_parameters.rope_theta": 11000.0})),
    "rope_pairs_of_k": ("Llama", {}, edit_tensor(ATTENTION + "k_proj.weight", interleaved)),
    "rope_factor": (
        "Llama",
        {"rope_parameters": ROPES["linear"]},
        edit_config(**{"rope_parameters.factor": 4.1}),
    ),
    "llama3_low_freq_factor": (
        "Llama",
        {"rope_parameters": ROPES["llama3"]},
        edit_config(**{"rope_parameters.low_freq_factor": 1.2}),
    ),
    "yarn_beta_fast": (
        "Llama",
        {"rope_parameters": ROPES["yarn_mscale"]},
        edit_config(**{"rope_parameters.beta_fast": 2.0}),
    ),
    "yarn_attention_factor": (
        "Llama",
        {"rope_parameters": ROPES["yarn"]},
        edit_config(**{"rope_parameters.attention_factor": 1.0}),
    ),
    "norm_eps": ("Llama", {}, edit_config(rms_norm_eps=1.5e-5)),
    "norm_weight": ("Llama", {}, edit_tensor("model.norm.weight", lambda weight: weight * 1.001)),
    "k_heads": ("Llama", {}, edit_tensor(ATTENTION + "k_proj.weight", swapped_heads)),
    "v_heads": ("Llama", {}, edit_tensor(ATTENTION + "v_proj.weight", swapped_heads)),
    "q_heads_of_one_group": ("Llama", {}, edit_tensor(ATTENTION + "q_proj.weight", swapped_heads)),
    "window": ("Mistral", {"sliding_window": 24}, edit_config(sliding_window=25)),
    "window_layer": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1},
        edit_config(layer_types=["full_attention"] * 2 + ["sliding_attention"]),
    ),
    "bias": ("Qwen2", {}, edit_tensor(ATTENTION + "v_proj.bias", lambda bias: bias.roll(1))),
    "q_norm": ("Qwen3", {"head_dim": 16}, edit_tensor(ATTENTION + "q_norm.weight", lambda weight: weight.roll(1))),
    "k_norm": ("Qwen3", {"head_dim": 16}, edit_tensor(ATTENTION + "k_norm.weight", torch.ones_like)),
    "local_rope": ("Gemma3", {}, edit_config(**{"rope_parameters.sliding_attention.rope_theta": 11000.0})),
    "global_rope": ("Gemma3", {}, edit_config(**{"rope_parameters.full_attention.factor": 8.2})),
    "gemma_layer_types": (
        "Gemma3",
        {},
        edit_config(layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    ),
    "query_scale": ("Gemma2", {}, edit_config(query_pre_attn_scalar=25)),
    "attention_softcap": ("Gemma2", {}, edit_config(attn_logit_softcapping=3.1)),
    "logits_softcap": ("Gemma2", {}, edit_config(final_logit_softcapping=1.01)),
    "activation": ("Gemma2", {}, edit_config(hidden_activation="silu")),
    "post_norm": (
        "Gemma3",
        {},
        edit_tensor("model.layers.1.post_feedforward_layernorm.weight", lambda weight: weight.roll(1)),
    ),
    "long_factor": (
        "Phi3",
        PARTIAL_LONG_ROPE,
        edit_config(**{"rope_parameters.long_factor": [1 + i * i / 3.01 for i in range(6)]}),
    ),
    "long_or_short_factor": ("Phi3", PARTIAL_LONG_ROPE, edit_config(original_max_position_embeddings=150)),
    "longrope_factor": ("Phi3", PARTIAL_LONG_ROPE, edit_config(max_position_embeddings=280)),
    "fused_qkv": ("Phi3", {}, edit_tensor(ATTENTION + "qkv_proj.weight", lambda weight: weight.roll(16, 0))),
    "fused_gate_up": (
        "Phi3",
        {},
        edit_tensor("model.layers.1.mlp.gate_up_proj.weight", lambda weight: weight.roll(80, 0)),
    ),
    "q_norm_of_all_heads": (
        "Olmo2",
        {},
        edit_tensor(ATTENTION + "q_norm.weight", lambda weight: weight.roll(16)),
    ),
    "olmo3_layer_types": (
        "Olmo3",
        {},
        edit_config(layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"]),
    ),
    "olmo3_full_rope": ("Olmo3", {}, edit_config(**{"rope_parameters.full_attention.factor": 4.1})),
    "olmo3_sliding_rope": ("Olmo3", {}, edit_config(**{"rope_parameters.sliding_attention.rope_theta": 5.5e5})),
    "embedding_multiplier": ("Granite", {}, edit_config(embedding_multiplier=7.4)),
    "attention_multiplier": ("Granite", {}, edit_config(attention_multiplier=0.215)),
    "residual_multiplier": ("Granite", {}, edit_config(residual_multiplier=0.371)),
    "logits_scaling": ("Granite", {}, edit_config(logits_scaling=2.71)),
    "no_rope_layers": ("SmolLM3", {}, edit_config(no_rope_layers=[1, 0, 0])),
    "partial_rotary_factor": (
        "Glm4",
        {},
        edit_config(**{"rope_parameters.partial_rotary_factor": 0.625}),
    ),
    "rope_interleaved": ("Glm", {}, edit_tensor(ATTENTION + "k_proj.weight", interleaved)),
    "post_self_attn_norm": (
        "Glm4",
        {},
        edit_tensor("model.layers.1.post_self_attn_layernorm.weight", lambda weight: weight.roll(1)),
    ),
    "llama_4_scaling": ("Ministral3", {}, edit_config(**{"rope_parameters.llama_4_scaling_beta": 0.51})),
    "ministral_layer_types": ("Ministral", {}, edit_config(layer_types=["sliding_attention"] * 3)),
    "latent_rope_pairs": ("DeepseekV3", LATENTS, edit_config(rope_interleave=False)),
    "latent_norm": ("DeepseekV2", LATENTS, edit_tensor(ATTENTION + "kv_a_layernorm.weight", torch.ones_like)),
    "latent_heads": (
        "DeepseekV2",
        LATENTS,
        edit_tensor(ATTENTION + "kv_b_proj.weight", lambda weight: weight.roll(44, 0)),
    ),
    "latent_mscale": (
        "DeepseekV2",
        LATENTS | {"rope_parameters": ROPES["yarn_mscale"]},
        edit_config(**{"rope_parameters.mscale_all_dim": 1.3}),
    ),
    "expert_correction": (
        "DeepseekV3",
        {},
        edit_tensor("model.layers.1.mlp.gate.e_score_correction_bias", lambda bias: bias.roll(1)),
    ),
    "expert_scale": ("DeepseekV2", {}, edit_config(routed_scaling_factor=1.8)),
    "expert_groups": ("DeepseekV3", {}, edit_config(topk_group=4)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[fault], tmp_path)


@pytest.mark.parametrize(("cache", "weights", "inputs"), SIXTEEN_BITS)
def test_a_small_fault_in_16_bits_is_noticed(
    cache: str, weights: torch.dtype, inputs: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_models.make_model("Llama")
    tiny_models.save(model, tmp_path, weights)
    edit_config(**{"rope_parameters.rope_theta": 10200.0})(tmp_path)
    to_exact, to_rounded = errors_in_16_bits(tmp_path, model, cache, weights, inputs)
    assert to_exact > 1.3 * tolerance.ROUNDING_ERROR_RATIO
    assert to_rounded > 1.3 * tolerance.ROUNDED_SHARE[cache]


# --- Checkpoints that must be refused ---


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        (edit_tensor("model.norm.weight", lambda weight: weight * float("nan")), "'model.norm.weight': value nan"),
        (edit_tensor(ATTENTION + "q_proj.weight", lambda weight: weight / 0), "q_proj.weight': value"),
        (edit_config(num_key_value_heads=1), r"shape \[32, 64\]; config.json asks for \[16, 64\]"),
        (edit_config(num_hidden_layers=4), "no tensor 'model.layers.3"),
        (edit_config(num_hidden_layers=2), "'model.layers.2.*would be ignored"),
        (
            edit_config(architectures=["BloomForCausalLM"]),
            "unknown architecture 'BloomForCausalLM'; the nearest of the",
        ),
        (edit_config(**{"rope_parameters.rope_type": "ntk"}), "yarn, longrope or proportional"),
    ],
)
def test_bad_checkpoints_are_refused(inject: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("Llama"), tmp_path)
    inject(tmp_path)
    with pytest.raises(kvanta.InputError, match=message):
        logits(tmp_path)


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("Llama"), tmp_path)
    for name in (ATTENTION + "v_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        edit_tensor(name, lambda weight: torch.full_like(weight, 3e38))(tmp_path)
    with pytest.raises(kvanta.InputError, match="position 0 are not finite"):
        logits(tmp_path)
