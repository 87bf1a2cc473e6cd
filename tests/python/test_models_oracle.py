"""Logits of random tiny checkpoints against transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tolerance
import torch
from logits_oracle import TOKENS, divergence, largest_error, logits, rms_error
from model_support import RecordSupport
from numpy.typing import NDArray
from transformers import PreTrainedModel

import kvanta
from kvanta.fleet.plan import plan

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
LATENTS: dict[str, Any] = {"first_k_dense_replace": tiny_models.LAYERS}


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
MINICPM_ROPE = long_rope(16) | {"original_max_position_embeddings": 64}
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
    "gemma": ("Gemma", {}),
    "gemma_bias": ("Gemma", {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "seed_oss": ("SeedOss", {}),
    "seed_oss_biases": ("SeedOss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_bias": ("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "exaone4": ("Exaone4", {}),
    "exaone4_layers": ("Exaone4", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "exaone4_no_window": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4, "rope_parameters": ROPES["llama3"]},
    ),
    "hunyuan": ("HunYuanDenseV1", {}),
    "hunyuan_bias_tied": (
        "HunYuanDenseV1",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": ROPES["default"]},
    ),
    "cwm": ("Cwm", {}),
    "cwm_layers": ("Cwm", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "hyperclovax": ("HyperCLOVAX", {}),
    "hyperclovax_no_post_norm": (
        "HyperCLOVAX",
        {"use_post_norm": False, "attention_bias": True, "mlp_bias": True, "attention_multiplier": None},
    ),
    "cohere": ("Cohere", {}),
    "cohere_qk_norm": (
        "Cohere",
        {"use_qk_norm": True, "tie_word_embeddings": False, "attention_bias": True, "rope_parameters": ROPES["yarn"]},
    ),
    "cohere2": ("Cohere2", {}),
    "cohere2_layers": (
        "Cohere2",
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "tie_word_embeddings": False},
    ),
    "arcee": ("Arcee", {}),
    "arcee_biases": ("Arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "nemotron": ("Nemotron", {}),
    "nemotron_biases": (
        "Nemotron",
        {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.75, "norm_eps": 0.01},
    ),
    "stablelm": ("StableLm", {}),
    "stablelm_parallel": (
        "StableLm",
        {"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 0.01},
    ),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2_window": (
        "Starcoder2",
        {"use_bias": False, "sliding_window": 24, "tie_word_embeddings": False, "norm_epsilon": 0.01},
    ),
    "phi": ("Phi", {}),
    "phi_gqa": (
        "Phi",
        {
            "num_key_value_heads": 1,
            "layer_norm_eps": 0.01,
            "hidden_act": "relu",
            "rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.75},
        },
    ),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox_in_turn": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 0.01},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2_fourfold": ("GPT2", {"intermediate_size": None, "tie_word_embeddings": False, "layer_norm_epsilon": 0.01}),
    "opt": ("OPT", {}),
    "opt_no_bias": ("OPT", {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "apertus": ("Apertus", {}),
    "apertus_bias": ("Apertus", {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": None}),
    "falcon": ("Falcon", {}),
    "falcon_heads": ("Falcon", {"multi_query": False, "bias": True, "parallel_attn": False}),
    "falcon_groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False}),
    "falcon_one_norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "layer_norm_epsilon": 0.01},
    ),
    "internlm2": ("InternLM2", {}),
    "internlm2_bias": ("InternLM2", {"attention_bias": True, "num_key_value_heads": 1, "head_dim": 32}),
    "minicpm": ("MiniCPM", {}),
    "minicpm_longrope": ("MiniCPM", {"max_position_embeddings": 256, "rope_parameters": MINICPM_ROPE}),
    "chatglm": ("ChatGLM", {"rope_parameters": ROPES["default"] | {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}),
    "chatglm_no_bias": ("ChatGLM", {"attention_bias": False, "num_key_value_heads": 4}),
    "granite_swa": ("GraniteSWA", {}),
    "granite_swa_layers": (
        "GraniteSWA",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "layer_rope_theta": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite_swa_yarn": ("GraniteSWA", {"rope_parameters": ROPES["yarn"]}),
    "jais2": ("Jais2", {}),
    "jais2_no_bias": (
        "Jais2",
        {
            "attention_bias": False,
            "mlp_bias": False,
            "layer_norm_eps": 0.01,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "helium": ("Helium", {}),
    "helium_biases": ("Helium", {"attention_bias": True, "mlp_bias": True, "rope_parameters": ROPES["llama3"]}),
    "nanochat": ("NanoChat", {}),
    "nanochat_no_softcap": (
        "NanoChat",
        {"final_logit_softcapping": None, "attention_bias": True, "num_key_value_heads": 4, "rms_norm_eps": 0.01},
    ),
    "gptj": ("GPTJ", {}),
    "gptj_fourfold": ("GPTJ", {"intermediate_size": None, "rotary_dim": 16, "layer_norm_epsilon": 0.01}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "gpt_bigcode_heads": (
        "GPTBigCode",
        {"multi_query": False, "intermediate_size": None, "tie_word_embeddings": False, "layer_norm_epsilon": 0.01},
    ),
    "olmo": ("Olmo", {}),
    "olmo_bias_tied": ("Olmo", {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": ROPES["yarn"]}),
    "vaultgemma": ("VaultGemma", {}),
    "vaultgemma_layers": (
        "VaultGemma",
        {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "attention_bias": True},
    ),
    "youtu": ("Youtu", {}),
    "youtu_rope_halves": ("Youtu", {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2": ("DeepseekV2", LATENTS | {"q_lora_rank": None}),
    "deepseek_v2_experts": ("DeepseekV2", {"attention_bias": True, "mlp_bias": True}),
    "deepseek_v2_groups": ("DeepseekV2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek_v2_yarn": ("DeepseekV2", LATENTS | {"rope_parameters": ROPES["yarn_mscale"]}),
    "deepseek_v3": ("DeepseekV3", {"rope_parameters": ROPES["yarn_mscale"]}),
    "deepseek_v3_one_group": ("DeepseekV3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
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


def test_float32_logits_equal_transformers(
    case: tuple[Path, NDArray[np.float32]], record_support: RecordSupport
) -> None:
    folder, expected = case
    found = logits(folder)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert divergence(found, expected) < tolerance.F32_DIVERGENCE
    record_support(folder, "F32")


@pytest.mark.parametrize("architecture", tiny_models.DENSE)
def test_plan_counts_the_parameters(architecture: str, tmp_path: Path) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert plan(str(tmp_path), 2**30)["parameters"] == expected


@pytest.mark.rotation("case", 3, 0)
def test_first_generation_of_config(case: tuple[Path, NDArray[np.float32]], tmp_path: Path) -> None:
    folder, expected = case
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tiny_models.as_first_generation(tmp_path)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


ARCHITECTURES = [*tiny_models.FIRST, *tiny_models.DENSE]
# Attention of transformers that is the class's own, in which nothing can be rounded; GraniteSWA's has sinks.
ROUNDED = [name for name in ARCHITECTURES if name not in ("Falcon", "GPTJ", "GraniteSWA")]
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


@pytest.mark.rotation("architecture", 2, "cache")
@pytest.mark.parametrize("architecture", ROUNDED)
@pytest.mark.parametrize(("cache", "weights", "inputs"), SIXTEEN_BITS)
def test_logits_in_16_bits(
    architecture: str, cache: str, weights: torch.dtype, inputs: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path, weights)
    to_exact, to_rounded = errors_in_16_bits(tmp_path, model, cache, weights, inputs)
    assert to_exact < (tolerance.BF16_ROUNDING_RATIO if cache == "bf16" else tolerance.ROUNDING_ERROR_RATIO)
    assert to_rounded < tolerance.ROUNDED_SHARE[cache]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fp8", "mla_fp8"),
        ("fp8_e5m2", "mla_fp8_e5m2"),
        ("int8", "mla_int8"),
        ("int4", "mla_int4"),
        ("nvfp4", "mla_nvfp4"),
    ],
)
def test_latents_take_the_names_that_people_type(typed: str, meant: str, tmp_path: Path) -> None:
    model = tiny_models.make_model("DeepseekV2", **LATENTS)
    tiny_models.save(model, tmp_path)
    engines = [
        kvanta.LLM(tmp_path, tokenizer="stories260k", kv_cache_dtype=name, page_size=16, max_model_len=len(TOKENS))
        for name in (typed, meant, "bf16")
    ]
    assert engines[0].stats()["kv_cache_dtype"] == meant
    of_typed, of_meant, exact = (engine.logits(TOKENS) for engine in engines)
    np.testing.assert_array_equal(of_typed, of_meant)
    assert not np.array_equal(of_typed, exact)


@pytest.mark.parametrize(("cache", "weights", "inputs"), SIXTEEN_BITS)
def test_latents_in_16_bits(cache: str, weights: torch.dtype, inputs: torch.dtype, tmp_path: Path) -> None:
    """The latent is rounded where transformers rounds keys and values; the error is as small."""
    model = tiny_models.make_model("DeepseekV2", **LATENTS)
    tiny_models.save(model, tmp_path, weights)
    to_exact, _ = errors_in_16_bits(tmp_path, model, cache, weights, inputs)
    assert to_exact < tolerance.LATENT_ROUNDING_RATIO


@pytest.mark.rotation("architecture", 2, "name")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("weights", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_16_bit_checkpoints_in_float32(
    architecture: str, weights: torch.dtype, name: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    model = tiny_models.make_model(architecture)
    tiny_models.save(model, tmp_path, weights)
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, name)


@pytest.mark.parametrize("architecture", ["Gemma", "Gemma2", "Gemma3", "Gemma4", *tiny_models.DENSE])
def test_bf16_is_no_farther_from_float32_than_transformers(architecture: str, tmp_path: Path) -> None:
    # sqrt(48), the scale of Gemma's embeddings, is rounded.
    size = {"hidden_size": 48} if architecture.startswith("Gemma") else {}
    model = tiny_models.make_model(architecture, **size)
    tiny_models.save(model, tmp_path, torch.bfloat16)
    exact = tiny_models.expected_logits(model, TOKENS)
    rounded = tiny_models.expected_logits(tiny_models.load(tmp_path, torch.bfloat16), TOKENS)
    assert rms_error(logits(tmp_path, "auto", "bf16"), exact) < rms_error(rounded, exact)


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("THUDM/chatglm2-6b-32k", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        ("THUDM/chatglm3-6b-32k", {"rope_type": "default", "rope_theta": 40000.0}),
    ],
)
def test_rope_ratio_of_chatglm(name: str, rope: dict[str, Any], tmp_path: Path) -> None:
    """One key with two meanings; files that do not say which model they are of are refused."""
    model = tiny_models.make_model("ChatGLM", vocab_size=65024, rope_parameters=rope | {"partial_rotary_factor": 0.5})
    tiny_models.save(model, tmp_path)
    tiny_models.edit_config(tmp_path, rope_ratio=4.0, _name_or_path=name)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    tiny_models.edit_config(tmp_path, _name_or_path="./output")
    with pytest.raises(kvanta.InputError, match=r"'rope_ratio' is 4\.0; expected 1, or _name_or_path with chatglm2"):
        logits(tmp_path)


def test_gelu_of_the_first_gemma_is_the_approximation(tmp_path: Path) -> None:
    model = tiny_models.make_model("Gemma")
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    tiny_models.edit_config(tmp_path, hidden_act="gelu")
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    loaded = tiny_models.expected_logits(tiny_models.load(tmp_path, torch.float32), TOKENS)
    assert largest_error(loaded, expected) == 0


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
