"""Logits of random tiny checkpoints with experts against transformers; and faults that the comparison must notice."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_models
import tolerance
import torch
from logits_oracle import (
    TOKENS,
    Fault,
    assert_noticed,
    divergence,
    edit_config,
    edit_names,
    edit_tensor,
    largest_error,
    logits,
    rms_error,
)
from model_support import RecordSupport
from numpy.typing import NDArray
from transformers import PreTrainedModel

import kvanta
from kvanta.calibration import calibrate, write_scale_file
from kvanta.evaluate import Settings, evaluate
from kvanta.models import SHIPPED
from kvanta.plan import plan

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
    expected = tiny_models.expected_logits(model, TOKENS)
    found = logits(tmp_path)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert divergence(found, expected) < tolerance.F32_DIVERGENCE
    record_support(tmp_path, "F32")


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_is_no_farther_from_float32_than_transformers(architecture: str, tmp_path: Path) -> None:
    """Over several models: one row that gets another expert outweighs all rounding of a model.

    On a unit with f32 operands: with bf16 ones the engine rounds where transformers does, and chance decides.
    """
    found, transformers = [], []
    for seed in range(4):
        folder = tmp_path / str(seed)
        model = tiny_models.make_model(architecture, seed)
        tiny_models.save(model, folder, torch.bfloat16)
        exact = tiny_models.expected_logits(model, TOKENS)
        rounded = tiny_models.expected_logits(tiny_models.load(folder, torch.bfloat16), TOKENS)
        found.append(rms_error(logits(folder, "auto", "bf16", isa=tolerance.EXACT_ISA), exact))
        transformers.append(rms_error(rounded, exact))
    assert np.linalg.norm(found) < np.linalg.norm(transformers)


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
    expected = tiny_models.expected_logits(model, TOKENS)
    found = logits(tmp_path)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert divergence(found, expected) < tolerance.F32_DIVERGENCE


def test_language_model_of_llama4_multimodal(tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_models.make_llama4_multimodal()
    tiny_models.save(model, tmp_path)
    assert "language_model.model.layers.1.feed_forward.experts.gate_up_proj" in safetensors.torch.load_file(
        tmp_path / "model.safetensors"
    )
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


# A tensor of each layout of experts that the hub has, and tiny_models.save writes.
LAYOUTS = {
    "Qwen3Moe": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "Qwen2Moe": "model.layers.1.mlp.shared_expert_gate.weight",
    "Mixtral": "model.layers.1.block_sparse_moe.experts.5.w3.weight",
    "GptOss": "model.layers.1.mlp.experts.gate_up_proj",
    "Glm4Moe": "model.layers.1.mlp.experts.7.up_proj.weight",
    "Llama4": "model.layers.1.feed_forward.experts.gate_up_proj",
}


@pytest.mark.parametrize("architecture", LAYOUTS)
def test_checkpoints_of_experts_have_the_hubs_layout(architecture: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture), tmp_path)
    assert LAYOUTS[architecture] in safetensors.torch.load_file(tmp_path / "model.safetensors")


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def as_mxfp4(folder: Path, model: PreTrainedModel) -> None:
    """Replaces the experts of the model and the checkpoint by random ones in MXFP4, as GPT-OSS publishes them."""
    random = np.random.default_rng(5)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = random.integers(0, 16, (experts, outputs, inputs // 32, 32), dtype=np.uint8)
        scales = random.integers(121, 126, (experts, outputs, inputs // 32), dtype=np.uint8)
        tensors[f"{name}_blocks"] = torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4)
        tensors[f"{name}_scales"] = torch.from_numpy(scales)
        values = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
        with torch.no_grad():
            matrices = torch.from_numpy(values.reshape(experts, outputs, inputs))
            parameters[name].copy_(matrices.transpose(1, 2))
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    tiny_models.edit_config(folder, quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_are_read_exactly(dtype: torch.dtype, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_models.make_model("GptOss")
    tiny_models.save(model, tmp_path, dtype)
    as_mxfp4(tmp_path, model)
    expected = tiny_models.expected_logits(model, TOKENS)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "mxfp4")


def test_mxfp4_experts_are_kept(tmp_path: Path) -> None:
    """In place of 16-bit weights: 17 bytes per 32, multiplied by 8-bit activations."""
    model = tiny_models.make_model("GptOss", num_local_experts=16)
    tiny_models.save(model, tmp_path, torch.bfloat16)
    in_16_bits = plan(str(tmp_path), 1 << 30)["weight_bytes"]
    rounded = tiny_models.load(tmp_path, torch.bfloat16)
    as_mxfp4(tmp_path, model)
    with torch.no_grad():
        for parameter, exact in zip(rounded.parameters(), model.parameters(), strict=True):
            parameter.copy_(exact)
    kept = plan(str(tmp_path), 1 << 30)["weight_bytes"]
    weights = 3 * 16 * 3 * 64 * 32
    assert in_16_bits - kept == 2 * weights - weights // 32 * 17
    options: dict[str, Any] = {"threads": 2, "kv_cache_memory_bytes": "8MiB"}
    assert kvanta.LLM(tmp_path, tokenizer="stories260k", **options).stats()["weight_bytes"] == kept
    expected = tiny_models.expected_logits(model, TOKENS)
    error = rms_error(logits(tmp_path, "auto", "bf16"), expected)
    assert 0 < error < 4 * rms_error(tiny_models.expected_logits(rounded, TOKENS), expected)


@pytest.mark.parametrize("weight_dtype", ["bf16", "int8", "int4"])
def test_a_weight_dtype_expands_mxfp4_experts(weight_dtype: str, tmp_path: Path) -> None:
    """The same bytes and bits as of a checkpoint that has the experts' values in bf16; with auto, others."""
    model = tiny_models.make_model("GptOss")
    tiny_models.save(model, packed := tmp_path / "packed", torch.bfloat16)
    as_mxfp4(packed, model)
    tiny_models.save(model, expanded := tmp_path / "expanded", torch.bfloat16)

    def measure(folder: Path, weight_dtype: str) -> tuple[tuple[int, int], NDArray[np.float32]]:
        options: dict[str, Any] = {"threads": 2, "kv_cache_memory_bytes": "8MiB", "weight_dtype": weight_dtype}
        llm = kvanta.LLM(folder, tokenizer="stories260k", **options)
        planned = plan(str(folder), 1 << 30, options={"weight_dtype": weight_dtype})["weight_bytes"]
        return (llm.stats()["weight_bytes"], planned), llm.logits(TOKENS)

    sizes, found = measure(packed, weight_dtype)
    expected_sizes, expected = measure(expanded, weight_dtype)
    kept_sizes, kept = measure(packed, "auto")
    assert sizes == expected_sizes
    assert sizes != kept_sizes
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(found, kept)


def test_bad_mxfp4_is_refused(tmp_path: Path) -> None:
    model = tiny_models.make_model("GptOss")
    tiny_models.save(model, tmp_path)
    as_mxfp4(tmp_path, model)
    name = "model.layers.1.mlp.experts.down_proj"
    shutil.copytree(tmp_path, scaled := tmp_path / "scaled")
    edit_tensor(f"{name}_scales", lambda scales: scales.clamp(min=253))(scaled)
    with pytest.raises(kvanta.InputError, match=rf"'{name}_scales': scale 253 \(at 0\) is not finite"):
        logits(scaled)
    edit_tensor(f"{name}_blocks", lambda blocks: blocks.to(torch.int16))(tmp_path)
    with pytest.raises(kvanta.InputError, match=rf"'{name}_blocks' is stored as I16; MXFP4 experts are U8"):
        logits(tmp_path)


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
