"""Logits of random tiny checkpoints against transformers; and faults that the comparison must notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_models
import tolerance
import torch
from logits_oracle import TOKENS, divergence, edit_config, edit_names, edit_tensor, largest_error, logits, rms_error
from numpy.typing import NDArray
from transformers import PreTrainedModel

import kvanta
from kvanta.plan import plan

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 64},
    "yarn": YARN | {"rope_theta": 10000.0},
    "yarn_mscale": YARN | {"rope_theta": 10000.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    "yarn_factor": YARN | {"rope_theta": 10000.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
}
# Attention over latents; without experts.
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 3,
}
EXPERTS: dict[str, Any] = LATENTS | {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}


def long_rope(channels: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + i / 10 for i in range(channels // 2)],
        "long_factor": [1 + i * i / 3 for i in range(channels // 2)],
    }


# The context is four times the original one.
LONG_ROPE: dict[str, Any] = {"max_position_embeddings": 600, "rope_parameters": long_rope(16)}
PARTIAL_LONG_ROPE: dict[str, Any] = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_parameters": long_rope(12) | {"partial_rotary_factor": 0.75},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama_{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_mha_biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama_mqa_head_dim": ("Llama", {"num_key_value_heads": 1, "head_dim": 40}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral_no_window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_windows": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    ),
    "gemma2": ("Gemma2", {}),
    "gemma2_no_softcap": (
        "Gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": ("Gemma3", {}),
    "gemma3_bias": ("Gemma3", {"attention_bias": True, "sliding_window": 100, "final_logit_softcapping": 1.5}),
    "gemma3_pattern": ("Gemma3", {"sliding_window_pattern": 3, "hidden_size": 48}),
    "phi3": ("Phi3", {}),
    "phi3_window": ("Phi3", {"sliding_window": 24, "num_key_value_heads": 4, "hidden_size": 96}),
    "phi3_longrope_long": ("Phi3", LONG_ROPE | {"original_max_position_embeddings": 64}),
    "phi3_longrope_short": ("Phi3", LONG_ROPE | {"original_max_position_embeddings": 150}),
    "phi3_partial": ("Phi3", PARTIAL_LONG_ROPE),
    "olmo2": ("Olmo2", {}),
    "olmo2_bias_tied": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo3": ("Olmo3", {}),
    "olmo3_layers": ("Olmo3", {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size": 96}),
    "granite": ("Granite", {}),
    "granite_bias_tied": ("Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {}),
    "smollm3_layers": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3_windows": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": 24, "rope_parameters": ROPES["yarn"]},
    ),
    "glm": ("Glm", {}),
    "glm_no_bias": ("Glm", {"attention_bias": False, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "glm4": ("Glm4", {}),
    "glm4_no_bias": ("Glm4", {"attention_bias": False, "head_dim": 32}),
    "ministral": ("Ministral", {}),
    "ministral3": ("Ministral3", {}),
    "ministral3_window": ("Ministral3", {"sliding_window": 24}),
    "deepseek_v2": ("DeepseekV2", LATENTS | {"q_lora_rank": None}),
    "deepseek_v2_experts": ("DeepseekV2", EXPERTS | {"attention_bias": True, "mlp_bias": True}),
    "deepseek_v2_groups": ("DeepseekV2", EXPERTS | GROUPS | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2_yarn": ("DeepseekV2", LATENTS | {"rope_parameters": ROPES["yarn_mscale"]}),
    "deepseek_v3": ("DeepseekV3", EXPERTS | GROUPS | {"rope_parameters": ROPES["yarn_mscale"]}),
    "deepseek_v3_one_group": ("DeepseekV3", EXPERTS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek_v3_rope_halves": ("DeepseekV3", LATENTS | {"rope_interleave": False, "q_lora_rank": None}),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.float32]]:
    """A checkpoint in float32, and what transformers makes of it."""
    architecture, settings = MODELS[request.param]
    model = tiny_models.make_model(architecture, **settings)
    folder = tmp_path_factory.mktemp(request.param)
    tiny_models.save(model, folder)
    return folder, tiny_models.expected_logits(model, TOKENS)


def test_float32_logits_equal_transformers(case: tuple[Path, NDArray[np.float32]]) -> None:
    folder, expected = case
    found = logits(folder)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert divergence(found, expected) < tolerance.F32_DIVERGENCE


@pytest.mark.parametrize("architecture", tiny_models.DENSE)
def test_plan_counts_the_parameters(architecture: str, tmp_path: Path) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert plan(str(tmp_path), 2**30)["parameters"] == expected


def test_first_generation_of_config(case: tuple[Path, NDArray[np.float32]], tmp_path: Path) -> None:
    folder, expected = case
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tiny_models.as_first_generation(tmp_path)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


ARCHITECTURES = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", *tiny_models.DENSE]
SIXTEEN_BITS = [
    ("bf16", torch.bfloat16, torch.bfloat16),
    ("fp16", torch.float16, torch.float32),
]  # cache, weights, inputs


def errors_in_16_bits(
    folder: Path, model: PreTrainedModel, cache: str, weights: torch.dtype, inputs: torch.dtype
) -> tuple[float, float]:
    """Distance from the exact logits, and from the rounded ones, in units of what rounding costs."""
    exact = tiny_models.expected_logits(model, TOKENS)
    rounded = tiny_models.rounded_logits(model, TOKENS, inputs, weights)
    cost = rms_error(rounded, exact)
    found = logits(folder, "auto", cache)
    return rms_error(found, exact) / cost, rms_error(found, rounded) / cost


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("cache", "weights", "inputs"), SIXTEEN_BITS)
def test_logits_in_16_bits(
    architecture: str, cache: str, weights: torch.dtype, inputs: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path, weights)
    to_exact, to_rounded = errors_in_16_bits(tmp_path, model, cache, weights, inputs)
    assert to_exact < tolerance.ROUNDING_ERROR_RATIO
    assert to_rounded < tolerance.ROUNDED_SHARE[cache]


@pytest.mark.parametrize(("cache", "weights", "inputs"), SIXTEEN_BITS)
def test_latents_in_16_bits(cache: str, weights: torch.dtype, inputs: torch.dtype, tmp_path: Path) -> None:
    """The latent is rounded where transformers rounds keys and values; the error is as small."""
    model = tiny_models.make_model("DeepseekV2", **LATENTS)
    tiny_models.save(model, tmp_path, weights)
    to_exact, _ = errors_in_16_bits(tmp_path, model, cache, weights, inputs)
    assert to_exact < tolerance.LATENT_ROUNDING_RATIO


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16])
def test_16_bit_checkpoints_in_float32(architecture: str, weights: torch.dtype, tmp_path: Path) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path, weights)
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


@pytest.mark.parametrize("architecture", ["Gemma2", "Gemma3", *tiny_models.DENSE])
def test_bf16_is_no_farther_from_float32_than_transformers(architecture: str, tmp_path: Path) -> None:
    # sqrt(48), the scale of Gemma's embeddings, is rounded.
    size = {"hidden_size": 48} if architecture.startswith("Gemma") else {}
    model = tiny_models.make_model(architecture, **size)
    tiny_models.save(model, tmp_path, torch.bfloat16)
    exact = tiny_models.expected_logits(model, TOKENS)
    rounded = tiny_models.expected_logits(tiny_models.load(tmp_path, torch.bfloat16), TOKENS)
    assert rms_error(logits(tmp_path, "auto", "bf16"), exact) < rms_error(rounded, exact)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_language_model_of_gemma3_multimodal(prefix: str, tmp_path: Path) -> None:
    model = tiny_models.make_gemma3_multimodal()
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    for saved in ("language_model.model.", "model.language_model."):
        edit_names(tmp_path, lambda name, saved=saved: name.replace(saved, prefix))  # type: ignore[misc]
    assert any(name.startswith(prefix) for name in safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


@pytest.mark.parametrize("text", ["Mistral", "Ministral3"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_language_model_of_mistral3(text: str, prefix: str, tmp_path: Path) -> None:
    model = tiny_models.make_mistral3(text)
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    head = "lm_head.weight" if prefix.startswith("model.") else "language_model.lm_head.weight"

    def rename(name: str) -> str:
        for saved in ("language_model.model.", "model.language_model."):
            if name.startswith(saved):
                return prefix + name.removeprefix(saved)
        return head if name.endswith("lm_head.weight") else name

    edit_names(tmp_path, rename)
    assert any(name.startswith(prefix) for name in safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    tiny_models.edit_config(tmp_path, tie_word_embeddings=...)  # as on the hub: by default it is true
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


def test_an_output_matrix_of_its_own_is_used(tmp_path: Path) -> None:
    """Also where config.json ties it to the embeddings, as transformers does."""
    model = tiny_models.make_model("Llama")
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    tiny_models.edit_config(tmp_path, tie_word_embeddings=True)
    loaded = tiny_models.expected_logits(tiny_models.load(tmp_path, torch.float32), TOKENS)
    assert largest_error(loaded, expected) == 0
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


def test_long_factors_are_those_of_the_longest_sequence(tmp_path: Path) -> None:
    """A cache cannot change keys that it has: a short sequence has the angles of the long one that it may become
    (docs/adr/0025)."""
    model = tiny_models.make_model("Phi3", **LONG_ROPE, original_max_position_embeddings=64)
    tiny_models.save(model, tmp_path)
    short, whole = TOKENS[:50], tiny_models.expected_logits(model, TOKENS)
    with pytest.warns(UserWarning, match=r"max_model_len = 150: all sequences .* more than 64 tokens"):
        found = logits(tmp_path, tokens=short)
    assert largest_error(found, whole[:50]) < tolerance.F32_LOGITS
    found = logits(tmp_path, tokens=short, max_model_len=64)
    expected = tiny_models.expected_logits(model, short)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert largest_error(found, whole[:50]) > 0.01


def test_shards(tmp_path: Path) -> None:
    model = tiny_models.make_model("Llama")
    tiny_models.save(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


@pytest.mark.parametrize("original", [150, 64])
def test_dynamic_rope_is_exact_up_to_the_original_length(original: int, tmp_path: Path) -> None:
    """Beyond it, transformers recomputes every key's rotation for each length: refused (docs/adr/0021)."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_models.make_model("Llama", rope_parameters=rope, max_position_embeddings=original)
    tiny_models.save(model, tmp_path)
    tokens = TOKENS[:original]
    expected = tiny_models.expected_logits(model, tokens)
    assert largest_error(logits(tmp_path, tokens=tokens, max_model_len=None), expected) < tolerance.F32_LOGITS
    with pytest.raises(kvanta.InputError, match=f"the model's limit is {original} tokens"):
        logits(tmp_path, max_model_len=original + 1)


# --- The power of the comparison: one fault in the checkpoint that Kvanta reads, and it must fail. ---


def swapped_heads(weight: torch.Tensor) -> torch.Tensor:
    heads = weight.reshape(-1, 16, weight.shape[1]).clone()
    heads[[0, 1]] = heads[[1, 0]]
    return heads.flatten(0, 1)


def interleaved(weight: torch.Tensor) -> torch.Tensor:
    """Channels in the order of the other rope convention: (0, 1), (2, 3), ... are the pairs."""
    return weight.reshape(-1, 2, 8, weight.shape[1]).transpose(1, 2).flatten(0, 2)


ATTENTION = "model.layers.1.self_attn."
FAULTS: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
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
        EXPERTS | GROUPS,
        edit_tensor("model.layers.1.mlp.gate.e_score_correction_bias", lambda bias: bias.roll(1)),
    ),
    "expert_scale": ("DeepseekV2", EXPERTS, edit_config(routed_scaling_factor=1.8)),
    "expert_groups": ("DeepseekV3", EXPERTS | GROUPS, edit_config(topk_group=4)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    architecture, settings, inject = FAULTS[fault]
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    inject(tmp_path)
    assert largest_error(logits(tmp_path), expected) > 3 * tolerance.F32_LOGITS


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
        (edit_config(architectures=["GPT2LMHeadModel"]), "unknown architecture 'GPT2LMHeadModel'; known: Llama"),
        (edit_config(**{"rope_parameters.rope_type": "ntk"}), "default, linear, dynamic, llama3, yarn or longrope"),
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
