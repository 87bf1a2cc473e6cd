"""Gemma 4 against transformers: heads of two sizes, keys that are values, shared layers, per-layer embeddings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_models
import tiny_multimodal
import tolerance
from logits_oracle import TOKENS, largest_error, logits
from model_support import RecordSupport
from numpy.typing import NDArray
from scale_probe import probe_tokens

from kvanta import LLM, InputError, SamplingParams
from kvanta.calibration import calibrate, write_scale_file
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.fleet.plan import plan

SHARED: dict[str, Any] = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 24,
    "num_key_value_heads": 1,
}
K_EQ_V: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "attention_bias": True}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "attention_k_eq_v": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "two_head_sizes": {},
    "k_eq_v": K_EQ_V,
    "shared_layers": SHARED,
    "untied": {"tie_word_embeddings": False, "final_logit_softcapping": None, "sliding_window": 100},
    "experts": EXPERTS,
    "per_layer_inputs": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
}


def saved(folder: Path, **settings: Any) -> NDArray[np.float32]:
    """Writes a checkpoint; what transformers makes of it."""
    model = tiny_models.make_model("Gemma4", **settings)
    tiny_models.save(model, folder)
    return tiny_models.expected_logits(model, TOKENS)


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    expected = saved(tmp_path, **MODELS[name])
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


def test_config_of_the_published_models(tmp_path: Path) -> None:
    """Heads of full attention have separate keys; transformers 5.23 writes them by layer."""
    expected = saved(tmp_path, **K_EQ_V)
    assert json.loads((tmp_path / "config.json").read_text())["per_layer_config"]["1"]["head_dim"] == 32
    tiny_models.edit_config(tmp_path, per_layer_config=..., global_head_dim=32, num_global_key_value_heads=1)
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


def test_language_model_of_the_multimodal_class(tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_multimodal.make_gemma4_multimodal(**SHARED)
    tiny_models.save(model, tmp_path)
    tiny_models.edit_config(tmp_path, **{"text_config.use_bidirectional_attention": "vision"})
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("is_multimodal", [False, True])
def test_the_unified_model(is_multimodal: bool, tmp_path: Path, record_support: RecordSupport) -> None:
    """Gemma 4 12B: without experts and per-layer embeddings; of its multimodal class the language model."""
    make: Callable[..., Any] = (
        tiny_multimodal.make_gemma4_unified_multimodal
        if is_multimodal
        else partial(tiny_models.make_model, "Gemma4Unified")
    )
    model = make(**K_EQ_V)
    tiny_models.save(model, tmp_path)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


def test_unused_projections_of_shared_layers_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints have them."""
    expected = saved(tmp_path, **SHARED)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{part}.weight"] = tensors[f"model.layers.1.self_attn.{part}.weight"].clone()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


@pytest.mark.parametrize("name", ["shared_layers", "k_eq_v", "experts"])
@pytest.mark.parametrize("kv_cache_dtype", ["int4_per_token_head", "fp8", "k=int8,v=nvfp4"])
def test_bits_do_not_depend_on_batches_chunks_or_hits(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    saved(tmp_path, **MODELS[name])
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True, logprobs=2)
    prompts: Any = [{"prompt_token_ids": [5 + i] * 3 + list(range(10, 90))} for i in range(3)]
    options: dict[str, Any] = {"tokenizer": "stories260k", "kv_cache_dtype": kv_cache_dtype, "threads": 2}
    small = LLM(tmp_path, block_size=16, max_num_batched_tokens=16, **options)
    alone = [small.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    large = LLM(tmp_path, block_size=16, max_num_batched_tokens=512, **options)
    for _ in range(2):  # the second time from the prefix cache
        together = [output.outputs[0] for output in large.generate(prompts, params)]
        assert [each.token_ids for each in together] == [each.token_ids for each in alone]
        assert [each.logprobs for each in together] == [each.logprobs for each in alone]


def test_layers_that_share_k_and_v_take_no_memory(tmp_path: Path) -> None:
    saved(tmp_path, **SHARED)
    [row] = plan(str(tmp_path), 1 << 20, ["bf16"], 64, {"block_size": 16})["formats"]
    assert row["page_bytes"] == 16 * 2 * 2 * (16 + 32 + 16)  # one KV head each
    assert row["bits_per_element"] == 16
    with pytest.raises(InputError, match="layer"):
        LLM(tmp_path, tokenizer="stories260k", kv_cache_dtype_skip_layers=["4"])


@pytest.mark.parametrize("name", ["two_head_sizes", "k_eq_v", "experts"])
def test_ranks_give_the_bits_of_one_process(name: str, tmp_path: Path) -> None:
    saved(tmp_path, **{**MODELS[name], "num_global_key_value_heads": 2})
    options: dict[str, Any] = {"tokenizer": "stories260k", "kv_cache_dtype": "nvfp4", "threads": 1}
    expected = LLM(tmp_path, **options).logits(TOKENS)
    np.testing.assert_array_equal(LLM(tmp_path, tensor_parallel_size=2, **options).logits(TOKENS), expected)


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_do_not_divide_shared_layers(option: str, tmp_path: Path) -> None:
    saved(tmp_path, **{**SHARED, "num_key_value_heads": 2})
    options: dict[str, Any] = {"tokenizer": "stories260k", option: 2}
    with pytest.raises(InputError, match=f"{option} = 2: .*embeddings"):
        LLM(tmp_path, **options)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
@pytest.mark.parametrize("name", ["k_eq_v", "shared_layers"])
def test_calibration_of_heads_of_two_sizes(name: str, granularity: str, tmp_path: Path) -> None:
    """Against scales that the engine measures by itself."""
    saved(tmp_path, **MODELS[name])
    options: dict[str, Any] = {"tokenizer": "stories260k", "max_model_len": 256, "threads": 1}
    reader = LLM(tmp_path, **options)
    tokens = probe_tokens(tmp_path, reader.model_info, 256)
    found = calibrate(reader, tokens, granularity=granularity, key_mean=True, outliers=4)
    scales = tmp_path / "scales.json"
    write_scale_file(scales, found, LLM(tmp_path, **options).model_info)
    measured = LLM(tmp_path, kv_cache_dtype="fp8", calculate_kv_scales=True, **options)
    for layer, stats in enumerate(measured.stats()["layers"]):
        own = found.of_layer(layer)
        heads, channels = measured.model_info.layer_heads[layer]
        assert own.k_mean is not None
        assert own.k_mean.shape == (heads, channels)
        largest = max(stats["v_scale"]) if granularity == "tensor" else stats["v_scale"]
        np.testing.assert_allclose(own.v_scale, largest, rtol=1e-6)
    for scheme in ("fp8", "fp8+mean", "k=fp8+outliers=4,v=fp8"):
        llm = LLM(tmp_path, kv_cache_dtype=scheme, quantization_param_path=str(scales), **options)
        assert np.isfinite(llm.logits(TOKENS)).all()
        used = llm.stats()["layers"][1]
        np.testing.assert_array_equal(used["v_scale"], np.broadcast_to(found.of_layer(1).v_scale, len(used["v_scale"])))


def test_query_matrices_name_the_heads(tmp_path: Path) -> None:
    saved(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, tmp_path / name)
    with pytest.raises(InputError, match=r"Gemma4ForCausalLM: .*2 KV heads of 16 channels .* no \+query"):
        LLM(tmp_path).query_moments(TOKENS)
    assert not {"klt2", "klt3"} & set(EngineFactory.find(str(tmp_path), 64, 1, {}).usable_formats(None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"per_layer_config": {"9": {"head_dim": 32}}}, "no layer but 0 to 4"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "head_dim and num_key_value_heads alone"),
        ({"per_layer_config": {"1": {"head_dim": 36}}}, "multiples of 8"),
        ({"rope_parameters.full_attention.partial_rotary_factor": 2}, "partial_rotary_factor"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        LLM(tmp_path, tokenizer="stories260k")
