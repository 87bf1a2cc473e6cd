"""Logits of random tiny checkpoints with experts against transformers; and faults that the comparison must notice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_classes
import tiny_models
import tiny_multimodal
import tiny_text_and_images
import tolerance
import torch
from logits_oracle import (
    TOKENS,
    Fault,
    assert_bf16_is_near,
    assert_equals_transformers,
    assert_noticed,
    edit_config,
    edit_names,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport

import kvanta
from kvanta.calibration import calibrate, write_scale_file
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.evaluate import Settings, evaluate

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32}),
    "qwen3_moe_dense_layers": ("Qwen3Moe", {"decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe_mlp_only_layers": ("Qwen3Moe", {"mlp_only_layers": [0, 2], "num_experts": 16}),
    "qwen3_moe_window": ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 24}),
    "mixtral": ("Mixtral", {}),
    "mixtral_window": ("Mixtral", {"sliding_window": 24, "head_dim": 32, "num_experts_per_tok": 1}),
    "qwen2_moe": ("Qwen2Moe", {}),
    "qwen2_moe_dense_layers": (
        "Qwen2Moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 24},
    ),
    "gpt_oss": ("GptOss", {}),
    "gpt_oss_full_attention": ("GptOss", {"layer_types": ["full_attention"] * 3, "num_experts_per_tok": 4}),
    "glm4_moe": ("Glm4Moe", {}),
    "glm4_moe_groups": (
        "Glm4Moe",
        {"n_group": 4, "topk_group": 2, "use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "glm4_moe_whole_heads": ("Glm4Moe", {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0}),
    "glm4_moe_lite": ("Glm4MoeLite", {}),
    "glm4_moe_lite_layers": (
        "Glm4MoeLite",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "n_shared_experts": 1,
        },
    ),
    "minimax_m2": ("MiniMaxM2", {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {}),
    "ernie4_5_moe_layers": (
        "Ernie4_5_Moe",
        {
            "num_hidden_layers": 4,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
    "olmoe": ("Olmoe", {}),
    "olmoe_biases": ("Olmoe", {"attention_bias": True, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "flex_olmo": ("FlexOlmo", {}),
    "granite_moe": ("GraniteMoe", {"attention_bias": True}),
    "granite_moe_shared": ("GraniteMoeShared", {}),
    "dots1": ("Dots1", {}),
    "dots1_windows": (
        "Dots1",
        {
            "sliding_window": 24,
            "max_window_layers": 1,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
        },
    ),
    "solar_open": ("SolarOpen", {"attention_bias": True}),
    "exaone_moe": ("ExaoneMoe", {}),
    "exaone_moe_layers": (
        "ExaoneMoe",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_group": 4,
            "topk_group": 2,
            "num_shared_experts": 1,
        },
    ),
    "afmoe": ("Afmoe", {}),
    "afmoe_layers": (
        "Afmoe",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_dense_layers": 2,
            "num_shared_experts": 1,
            "mup_enabled": False,
            "num_key_value_heads": 4,
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {}),
    "hunyuan_moe_biases": ("HunYuanMoEV1", {"attention_bias": True, "rope_parameters": None, "moe_topk": 1}),
    "mistral4": ("Mistral4", {}),
    "mistral4_other_keys": (
        "Mistral4",
        {
            "q_lora_rank": None,
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
        },
    ),
    "mimo_v2_flash": ("MiMoV2Flash", {}),
    "mimo_v2_flash_layers": (
        "MiMoV2Flash",
        {
            "num_hidden_layers": 4,
            "layer_types": None,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "attention_bias": True,
            "attention_value_scale": None,
            "head_dim": 32,
            "v_head_dim": 32,
            "num_key_value_heads": 2,
            "rope_parameters": None,
        },
    ),
    "phimoe": ("Phimoe", {}),
    "phimoe_longrope": (
        "Phimoe",
        {
            "attention_bias": False,
            "lm_head_bias": False,
            "router_jitter_noise": 0.01,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0 + 0.2 * i for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 200,
            },
        },
    ),
    "step3p5": ("Step3p5", {}),
    "step3p7": ("Step3p7", {}),
    "step3p7_layers": (
        "Step3p7",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "num_sliding_attention_heads": None,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "query_pre_attn_scalar": None,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": None,
            "tie_word_embeddings": True,
        },
    ),
    "laguna": ("Laguna", {}),
    "laguna_gates_of_channels": (
        "Laguna",
        {
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_attention_heads_per_layer": None,
            "layer_types": None,
            "moe_router_logit_softcapping": 0.0,
            "rope_parameters": None,
        },
    ),
    "laguna_bias": ("Laguna", {"attention_bias": True, "num_attention_heads_per_layer": [2, 8, 6]}),
    "mellum": ("Mellum", {}),
    "mellum_layers": (
        "Mellum",
        {
            "layer_types": ["sliding_attention"] * 3,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_parameters": None,
        },
    ),
    "hy_v3": ("HYV3", {}),
    "hy_v3_layers": (
        "HYV3",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "mlp_bias": True,
            "num_shared_experts": 1,
        },
    ),
    "cohere2_moe": ("Cohere2Moe", {}),
    "cohere2_moe_sigmoid": (
        "Cohere2Moe",
        {
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "norm_topk_prob": False,
            "rms_norm_eps": 0.01,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "prefix_dense_sliding_window_pattern": 2,
            "num_shared_experts": 2,
        },
    ),
    "cohere2_moe_no_shared": (
        "Cohere2Moe",
        {"num_shared_experts": 0, "layer_types": None, "mlp_layer_types": None, "sliding_window_pattern": 2},
    ),
    "granite_moe_swa": ("GraniteMoeSWA", {}),
    "granite_moe_swa_layers": (
        "GraniteMoeSWA",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "layer_rope_theta": None,
            "shared_intermediate_size": 0,
            "attention_bias": True,
        },
    ),
    "axk1": ("AXK1", {}),
    "axk1_layers": (
        "AXK1",
        {
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "first_k_dense_replace": None,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "llama4": ("Llama4", {}),
    "llama4_dense_layers": ("Llama4", {"moe_layers": [1], "num_experts_per_tok": 2, "use_qk_norm": False}),
    "llama4_scaled_rope": (
        "Llama4",
        {
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
ARCHITECTURES = tiny_models.WITH_EXPERTS


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    architecture, settings = MODELS[name]
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


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


@pytest.mark.rotation("architecture", 3, 0)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_is_no_farther_from_float32_than_transformers(architecture: str, tmp_path: Path) -> None:
    """Over several models: one row that gets another expert outweighs all rounding of a model.

    On a unit with f32 operands: with bf16 ones the engine rounds where transformers does, and chance decides.
    """
    # Norms after the blocks enlarge an exchange of experts so much that chance decides: every row goes to all of them.
    settings = {"num_experts_per_tok": 8} if architecture in ("Afmoe", "FlexOlmo") else {}
    assert_bf16_is_near(architecture, tmp_path, settings, isa=tolerance.EXACT_ISA)


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "GptOss", "Llama4"])
def test_calibration_and_evaluation(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    folder = tmp_path / "model"
    model = tiny_models.make_model(architecture, vocab_size=512, hidden_size=128, head_dim=32)
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    options: dict[str, Any] = {"max_model_len": 192, "kv_cache_memory_bytes": "8MiB", "threads": 1}
    reader = kvanta.LLM(folder, kv_cache_dtype="bf16", **options)
    scales = calibrate(reader, np.random.default_rng(11).integers(3, 512, 150), granularity="head")
    write_scale_file(tmp_path / "scales.json", scales, reader.model_info)
    llm = kvanta.LLM(folder, kv_cache_dtype="fp8", quantization_param_path=str(tmp_path / "scales.json"), **options)
    for layer, stats in enumerate(llm.stats()["layers"]):
        np.testing.assert_array_equal(stats["k_scale"], scales.k_scale[layer])
    settings = Settings(formats=["int8_g32", "int4"], context=128, tokens=256, engine={"threads": 1})
    rows = evaluate(str(folder), settings)["formats"]
    assert all(0 < row["kl_mean"] < 0.5 for row in rows.values()), rows


KIMI_K2: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    model = tiny_models.make_model("DeepseekV3", **KIMI_K2)
    tiny_models.save(model, tmp_path)
    tiny_models.as_first_generation(tmp_path)
    tiny_models.edit_config(tmp_path, model_type="kimi_k2", rope_interleave=...)
    assert_equals_transformers(model, tmp_path)


def test_language_model_of_llama4_multimodal(tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_multimodal.make_llama4_multimodal()
    tiny_models.save(model, tmp_path)
    assert "language_model.model.layers.1.feed_forward.experts.gate_up_proj" in safetensors.torch.load_file(
        tmp_path / "model.safetensors"
    )
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("layout", ["saved", "published"])
def test_language_model_of_qwen3_vl_moe(layout: str, tmp_path: Path, record_support: RecordSupport) -> None:
    """transformers saves the experts as [out][in], and reads the published [in][out] by their shape."""
    model = tiny_classes.make_qwen3_vl_moe()
    tiny_models.save(model, tmp_path)
    if layout == "published":
        for layer in range(3):
            for part in ("gate_up_proj", "down_proj"):
                name = f"model.language_model.layers.{layer}.mlp.experts.{part}"
                edit_tensor(name, lambda experts: experts.transpose(1, 2))(tmp_path)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


def test_language_model_of_glm4v_moe(tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_text_and_images.make_glm4v("Glm4vMoe")
    tiny_models.save(model, tmp_path)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


def test_keys_of_minimax_m2_as_published(tmp_path: Path) -> None:
    model = tiny_models.make_model("MiniMaxM2")
    tiny_models.save(model, tmp_path)
    tiny_models.as_first_generation(tmp_path)
    tiny_models.edit_config(tmp_path, partial_rotary_factor=..., rotary_dim=16, attn_type_list=[1] * 3)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


def test_published_name_of_exaone_moe_and_predictors_of_ernie(tmp_path: Path) -> None:
    """The name has a letter in the other case; predictors of further tokens are left out, as in transformers."""
    for architecture in ("ExaoneMoe", "Ernie4_5_Moe"):
        folder = tmp_path / architecture
        model = tiny_models.make_model(architecture)
        tiny_models.save(model, folder)
        if architecture == "ExaoneMoe":
            tiny_models.edit_config(folder, architectures=["ExaoneMoEForCausalLM"])
        else:
            file = folder / "model.safetensors"
            tensors = safetensors.torch.load_file(file) | {"model.mtp_emb_norm.0.weight": torch.ones(64)}
            safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        assert largest_error(logits(folder), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


# A tensor of each layout of experts that the hub has, and tiny_models.save writes.
LAYOUTS = {
    "Qwen3Moe": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "Qwen2Moe": "model.layers.1.mlp.shared_expert_gate.weight",
    "Mixtral": "model.layers.1.block_sparse_moe.experts.5.w3.weight",
    "GptOss": "model.layers.1.mlp.experts.gate_up_proj",
    "Glm4Moe": "model.layers.1.mlp.experts.7.up_proj.weight",
    "Llama4": "model.layers.1.feed_forward.experts.gate_up_proj",
    "Glm4MoeLite": "model.layers.1.mlp.experts.7.up_proj.weight",
    "MiniMaxM2": "model.layers.1.block_sparse_moe.e_score_correction_bias",
    "Ernie4_5_Moe": "model.layers.1.mlp.moe_statics.e_score_correction_bias",
    "Olmoe": "model.layers.1.mlp.experts.7.up_proj.weight",
    "FlexOlmo": "model.layers.1.mlp.experts.7.up_proj.weight",
    "GraniteMoe": "model.layers.1.block_sparse_moe.input_linear.weight",
    "GraniteMoeShared": "model.layers.1.shared_mlp.input_linear.weight",
    "Dots1": "model.layers.1.mlp.experts.7.up_proj.weight",
    "SolarOpen": "model.layers.1.mlp.experts.7.up_proj.weight",
    "ExaoneMoe": "model.layers.1.mlp.e_score_correction_bias",
    "Afmoe": "model.layers.1.mlp.expert_bias",
    "HunYuanMoEV1": "model.layers.1.mlp.shared_mlp.up_proj.weight",
    "Mistral4": "model.layers.1.mlp.experts.gate_up_proj",
    "MiMoV2Flash": "model.layers.1.self_attn.attention_sink_bias",
    "Phimoe": "model.layers.1.block_sparse_moe.experts.5.w3.weight",
    "Step3p5": "model.layers.1.moe.gate_proj.weight",
    "Step3p7": "model.layers.1.moe.router_bias",
    "Laguna": "model.layers.1.mlp.experts.e_score_correction_bias",
    "Mellum": "model.layers.1.mlp.experts.7.up_proj.weight",
    "HYV3": "model.layers.1.mlp.shared_mlp.up_proj.weight",
    "Cohere2Moe": "model.layers.1.mlp.experts.7.up_proj.weight",
    "GraniteMoeSWA": "model.layers.1.block_sparse_moe.experts.gate_up_proj",
    "AXK1": "model.layers.1.post_mlp_layernorm.weight",
}


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_checkpoints_of_experts_have_the_hubs_layout(architecture: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture), tmp_path)
    assert LAYOUTS[architecture] in safetensors.torch.load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("count", [6, 16])
@pytest.mark.parametrize(("architecture", "router"), [("Qwen3Moe", "gate.weight"), ("GptOss", "router.bias")])
def test_a_number_of_experts_that_does_not_fit(architecture: str, router: str, count: int, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture, num_local_experts=8), tmp_path)
    edit_config(num_local_experts=count)(tmp_path)
    message = rf"'model\.layers\.0\.mlp\.{re.escape(router)}' has shape \[8\D.*config\.json asks for \[{count}\D"
    with pytest.raises(kvanta.InputError, match=message):
        logits(tmp_path)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("Qwen3Moe"), tmp_path)
    edit_names(tmp_path, lambda name: name.replace("layers.2.mlp.experts.7.", "layers.2.mlp.experts.8."))
    with pytest.raises(
        kvanta.InputError, match=r"no tensor 'model\.layers\.2\.mlp\.experts\.7\.gate_proj\.weight'; the near"
    ):
        logits(tmp_path)


ATTENTION = "model.layers.1.self_attn."
FAULTS: dict[str, Fault] = {
    "router": (
        "Qwen3Moe",
        {},
        edit_tensor("model.layers.1.mlp.gate.weight", lambda weight: weight.roll(1, 0)),
    ),
    "expert_gate_and_up": (
        "GptOss",
        {},
        edit_tensor("model.layers.1.mlp.experts.gate_up_proj", lambda weight: weight.roll(1, 2)),
    ),
    "expert_bias": (
        "GptOss",
        {},
        edit_tensor("model.layers.1.mlp.experts.down_proj_bias", lambda bias: bias.roll(1, 0)),
    ),
    "router_bias": ("GptOss", {}, edit_tensor("model.layers.1.mlp.router.bias", lambda bias: bias.roll(1))),
    "sinks": ("GptOss", {}, edit_tensor(ATTENTION + "sinks", lambda sinks: sinks.roll(1))),
    "window_of_even_layers": ("GptOss", {}, edit_config(layer_types=["full_attention"] + ["sliding_attention"] * 2)),
    "yarn_truncate": ("GptOss", {}, edit_config(**{"rope_parameters.truncate": True})),
    "partial_rotary": ("Glm4Moe", {}, edit_config(**{"rope_parameters.partial_rotary_factor": 0.75})),
    "chunk": ("Llama4", {}, edit_config(attention_chunk_size=41)),
    "layer_without_rope": ("Llama4", {}, edit_config(no_rope_layers=[1, 0, 1], layer_types=...)),
    "temperature": ("Llama4", {}, edit_config(floor_scale=17)),
    "l2_norm": ("Llama4", {}, edit_config(use_qk_norm=False)),
    "fused_gate_and_up": (
        "Llama4",
        {},
        edit_tensor("model.layers.1.feed_forward.experts.gate_up_proj", lambda weight: weight.roll(32, 2)),
    ),
    "correction_bias": (
        "MiniMaxM2",
        {},
        edit_tensor("model.layers.1.block_sparse_moe.e_score_correction_bias", lambda bias: bias.roll(1)),
    ),
    "correction_of_a_softmax": (
        "Ernie4_5_Moe",
        {},
        edit_tensor("model.layers.1.mlp.moe_statics.e_score_correction_bias", lambda bias: bias.roll(1)),
    ),
    "shared_expert_next_to_the_block": (
        "GraniteMoeShared",
        {},
        edit_tensor("model.layers.1.shared_mlp.input_linear.weight", lambda weight: weight.roll(1, 0)),
    ),
    "output_gate": ("Afmoe", {}, edit_tensor(ATTENTION + "gate_proj.weight", lambda weight: weight.roll(1, 0))),
    "embedding_scale": ("Afmoe", {}, edit_config(mup_enabled=False)),
    "scale_of_queries": ("Mistral4", {}, edit_config(**{"rope_parameters.llama_4_scaling_beta": 0.4})),
    "shared_mlp": (
        "HunYuanMoEV1",
        {},
        edit_tensor("model.layers.1.mlp.shared_mlp.down_proj.weight", lambda weight: weight.roll(1, 0)),
    ),
    "sinks_of_windows": (
        "MiMoV2Flash",
        {},
        edit_tensor(ATTENTION + "attention_sink_bias", lambda sinks: sinks.roll(1)),
    ),
    "scale_of_values": ("MiMoV2Flash", {}, edit_config(attention_value_scale=0.8)),
    "head_gate": ("Step3p7", {}, edit_tensor(ATTENTION + "g_proj.weight", lambda weight: weight.roll(1, 0))),
    "limit_of_experts": ("Step3p7", {}, edit_config(**{"text_config.swiglu_limits": [0, 0, 1.0, 0.6]})),
    "limit_of_shared_experts": ("Step3p7", {}, edit_config(**{"text_config.swiglu_limits_shared": [0.7, 0, 0, 0.6]})),
    "limit_of_an_mlp": ("Step3p5", {}, edit_config(swiglu_limits_shared=[0.6, 0, 0, 0.5])),
    "softplus_gate": ("Laguna", {}, edit_tensor(ATTENTION + "g_proj.weight", lambda weight: weight.roll(1, 0))),
    "softcap_of_the_router": ("Laguna", {}, edit_config(moe_router_logit_softcapping=3.0)),
    "average_with_the_shared_expert": ("Cohere2Moe", {}, edit_config(shared_expert_combination_strategy="sum")),
    "rope_of_dense_layers": ("Cohere2Moe", {}, edit_config(prefix_dense_sliding_window_pattern=2)),
    "sinks_of_granite": ("GraniteMoeSWA", {}, edit_tensor(ATTENTION + "sinks", lambda sinks: sinks.roll(1))),
    "bases_by_layer": ("GraniteMoeSWA", {}, edit_config(layer_rope_theta=[1e4, 1e4, 5e5, 1e4])),
    "norm_after_experts": (
        "AXK1",
        {},
        edit_tensor("model.layers.1.post_mlp_layernorm.weight", lambda weight: weight.roll(1)),
    ),
    "jitter_noise": ("Phimoe", {}, edit_config(router_jitter_noise=0.2)),
    "bias_of_logits": ("Phimoe", {}, edit_tensor("lm_head.bias", lambda bias: bias.roll(1))),
    "norm_of_top_k": ("Qwen3Moe", {}, edit_config(norm_topk_prob=False)),
    "shared_expert_gate": (
        "Qwen2Moe",
        {},
        edit_tensor("model.layers.1.mlp.shared_expert_gate.weight", lambda weight: weight.roll(1, 1)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[fault], tmp_path)
