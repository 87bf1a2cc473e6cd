"""DeepSeek V3.2, GLM-5 and Mistral Large 4, whose indexers select the tokens that attention reads: logits against
transformers, and the bits of every way to a token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_multimodal
import tolerance
import torch
from logits_oracle import (
    ISAS,
    TOKENS,
    Fault,
    assert_bf16_is_near,
    assert_equals_on_isa,
    assert_equals_transformers,
    assert_noticed,
    divergence,
    edit_config,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport
from sparse_runs import (
    assert_chunks_equal_one_pass,
    assert_hits_and_preemptions_equal_a_cold_run,
    assert_pages_are_found_on_disk,
)

from kvanta import LLM
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError
from kvanta.fleet.plan import plan

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", {}),
    "deepseek_v32_yarn": ("DeepseekV32", {"rope_parameters": YARN, "attention_bias": True}),
    "deepseek_v32_one_token": ("DeepseekV32", {"index_topk": 1, "index_n_heads": 20}),
    "deepseek_v32_below_the_threshold": ("DeepseekV32", {"index_topk": len(TOKENS)}),
    "deepseek_v32_wide_keys": ("DeepseekV32", {"index_topk": 100, "index_head_dim": 64}),
    "glm_moe_dsa": ("GlmMoeDsa", {}),
    "glm_moe_dsa_shared": ("GlmMoeDsa", {"indexer_types": ["full", "shared", "full"], "index_topk": 40}),
    "glm_moe_dsa_shared_to_the_end": ("GlmMoeDsa", {"indexer_types": ["full", "shared", "shared"]}),
}
LAYER = "model.layers.1.self_attn.indexer."
LARGE: dict[str, dict[str, Any]] = {
    "default": {},
    "rope in all layers": {"no_rope_layers": [1, 1, 1]},
    "layers without rope by interval": {"no_rope_layers": None, "no_rope_layer_interval": 2},
    "shared selections": {"indexer_types": ["full", "shared", "full"], "index_topk": 40},
    "all tokens": {"index_topk": len(TOKENS), "attention_bias": True, "n_shared_experts": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    architecture, settings = MODELS[name]
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("name", LARGE)
def test_mistral_large_4(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_multimodal.make_mistral_large4(**LARGE[name])
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


OF_LARGE = "layers.1.attention."
LARGE_FAULTS = {
    "exponents of frequencies": edit_tensor("lerope.alpha", lambda x: x + 0.05),
    "factors of queries": edit_tensor(OF_LARGE + "ssmax_scaling.s", lambda x: x.flip(0)),
    "bias of factors": edit_tensor("layers.0.attention.ssmax_scaling.b", lambda x: x.flip(0)),
    "factors of the indexer": edit_tensor(OF_LARGE + "indexer.ssmax_scaling.s", lambda x: x.flip(0)),
    "norm of the indexer's inputs": edit_tensor(OF_LARGE + "indexer.q_input_norm.weight", lambda x: x.flip(0)),
    "softcap": edit_config(**{"text_config.final_logit_softcapping": 3.0}),
    "eps of latents": edit_config(**{"text_config.rms_norm_eps": 3e-3}),
}


@pytest.mark.parametrize("name", LARGE_FAULTS)
def test_faults_of_mistral_large_4_are_noticed(name: str, tmp_path: Path) -> None:
    model = tiny_multimodal.make_mistral_large4()
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    LARGE_FAULTS[name](tmp_path)
    assert largest_error(logits(tmp_path), expected) > 3 * tolerance.F32_LOGITS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config.kv_source_layers": [0, 0, 2]}, "kv_source_layers' is a list of 3; expected each layer's own"),
        ({"text_config.no_rope_layers": [1]}, "for each of 3 layers"),
        ({"text_config.n_group": 2}, "n_group"),
        ({"text_config.indexer_types": ["shared", "full", "full"]}, "an indexer in the first layer"),
    ],
)
def test_bad_configs_of_mistral_large_4(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_multimodal.make_mistral_large4(), tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        logits(tmp_path)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, tmp_path: Path) -> None:
    assert_equals_on_isa(isa, tiny_models.make_model("DeepseekV32"), tmp_path)


@pytest.mark.parametrize("architecture", ["DeepseekV32", "GlmMoeDsa"])
def test_bf16_is_no_farther_from_float32_than_transformers(
    architecture: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    record_support(assert_bf16_is_near(architecture, tmp_path, {}), "BF16")


FAULTS: dict[str, Fault] = {
    "one token less": ("DeepseekV32", {}, edit_config(index_topk=15)),
    "heads' weights": ("DeepseekV32", {}, edit_tensor(LAYER + "weights_proj.weight", lambda x: x.flip(0))),
    "queries": ("DeepseekV32", {}, edit_tensor(LAYER + "wq_b.weight", lambda x: x.roll(32, 0))),
    "keys": ("DeepseekV32", {}, edit_tensor(LAYER + "wk.weight", lambda x: x.roll(1, 0))),
    "bias of the keys' norm": ("DeepseekV32", {}, edit_tensor(LAYER + "k_norm.bias", torch.zeros_like)),
    "rotated pairs": ("DeepseekV32", {}, edit_config(indexer_rope_interleave=True)),
    "rotated halves": ("GlmMoeDsa", {}, edit_config(indexer_rope_interleave=False)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


@pytest.mark.parametrize(
    ("changes", "types"),
    [
        ({"index_topk_pattern": "FSF"}, ["full", "shared", "full"]),
        ({"index_topk_pattern": ["full", "full", "shared"]}, ["full", "full", "shared"]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, ["full", "shared", "full"]),
        ({"index_topk_freq": 2}, ["full", "full", "shared"]),
        ({}, ["full", "full", "full"]),
    ],
)
def test_layers_with_indexers_by_other_keys(changes: dict[str, Any], types: list[str], tmp_path: Path) -> None:
    model = tiny_models.make_model("GlmMoeDsa", indexer_types=types)
    tiny_models.save(model, tmp_path)
    tiny_models.edit_config(tmp_path, indexer_types=..., **changes)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


def test_predicted_layers_are_left_out(tmp_path: Path) -> None:
    model = tiny_models.make_model("DeepseekV32", num_hidden_layers=4)
    tiny_models.save(model, tmp_path)
    tiny_models.edit_config(tmp_path, num_hidden_layers=3, num_nextn_predict_layers=1, mlp_layer_types=...)
    assert np.isfinite(logits(tmp_path)).all()


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk"),
        ("DeepseekV32", {"index_head_dim": 12}, "index_head_dim"),
        ("DeepseekV32", {"index_head_dim": 8}, "at least qk_rope_head_dim"),
        ("DeepseekV32", {"rope_interleave": False}, "rope_interleave"),
        ("GlmMoeDsa", {"indexer_types": ["shared", "full", "full"]}, "an indexer in the first layer"),
        ("GlmMoeDsa", {"indexer_types": ["full"]}, "for each of 3 layers"),
        ("GlmMoeDsa", {"indexer_types": ..., "index_topk_pattern": "FX"}, "F or S for each of 3 layers"),
    ],
)
def test_bad_configs(architecture: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture), tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        logits(tmp_path)


@pytest.mark.parametrize("architecture", ["DeepseekV32", "GlmMoeDsa"])
def test_plan_counts_the_parameters(architecture: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"indexer_types": ["full", "shared", "full"]} if architecture == "GlmMoeDsa" else {}
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    expected = sum(parameter.numel() for parameter in model.parameters()) + biases
    assert plan(str(tmp_path), 2**30)["parameters"] == expected


def test_plan_counts_the_parameters_of_mistral_large_4(tmp_path: Path) -> None:
    model: Any = tiny_multimodal.make_mistral_large4(indexer_types=["full", "shared", "full"])
    tiny_models.save(model, tmp_path)
    language_model = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    assert plan(str(tmp_path), 2**30)["parameters"] == sum(parameter.numel() for parameter in language_model)


# ---- the cache of indexers


@pytest.fixture(scope="module", params=["DeepseekV32", "GlmMoeDsa", "MistralLarge4"])
def sparse(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of stories260k, and rows that every format takes."""
    folder = tmp_path_factory.mktemp(request.param)
    settings: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 1024, "kv_lora_rank": 128}
    if request.param == "GlmMoeDsa":
        settings["indexer_types"] = ["full", "shared", "full"]
    if request.param == "MistralLarge4":
        model = tiny_multimodal.make_mistral_large4(**settings)
    else:
        model = tiny_models.make_model(request.param, **settings)
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "16MiB", "threads": 2}
CACHES = [("bf16", "auto"), ("fp8", "auto"), ("int8", "int8"), ("int4", "int4"), ("nvfp4", "nvfp4"), ("int4", "fp8")]


def options_of(cache: tuple[str, str], **others: Any) -> dict[str, Any]:
    return {**OPTIONS, "kv_cache_dtype": cache[0], "indexer_cache_dtype": cache[1], **others}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("chunk", [64, 128])
def test_chunks_and_decode_give_the_bits_of_one_pass(sparse: Path, cache: tuple[str, str], chunk: int) -> None:
    assert_chunks_equal_one_pass(sparse, options_of(cache), chunk)


@pytest.mark.parametrize("cache", CACHES)
def test_prefix_hits_and_preemptions_give_the_bits_of_a_cold_run(sparse: Path, cache: tuple[str, str]) -> None:
    small = assert_hits_and_preemptions_equal_a_cold_run(sparse, options_of(cache), rounds=1, cached_tokens=2 * 128)
    assert small.stats()["preemptions"] > 0


def test_keys_of_indexers_are_a_group_of_their_own(sparse: Path) -> None:
    indexers = 2 if sparse.name.startswith("GlmMoeDsa") else 3
    stats = LLM(sparse, **options_of(("fp8", "auto"))).stats()
    latents, keys = stats["groups"]
    assert latents["layers"] == [0, 1, 2]
    assert keys["layers"] == list(range(3, 3 + indexers))
    assert keys["page_bytes"] == 64 * indexers * (32 + 4), "32 channels and a scale"
    assert {layer["scheme"] for layer in stats["layers"][3:]} == {"mla_fp8+hadamard"}
    exact = LLM(sparse, **options_of(("bf16", "auto"))).stats()
    assert {layer["scheme"] for layer in exact["layers"][3:]} == {"bf16"}
    plain = LLM(sparse, **options_of(("fp8", "fp8-hadamard"))).stats()
    assert {layer["scheme"] for layer in plain["layers"][3:]} == {"mla_fp8"}
    with pytest.raises(InputError, match="keys of an indexer"):
        LLM(sparse, **options_of(("fp8", "kivi4")))


@pytest.mark.parametrize("cache", [("fp8", "auto"), ("int4", "int4")])
def test_pages_are_found_on_disk_after_a_restart(sparse: Path, cache: tuple[str, str], tmp_path: Path) -> None:
    assert_pages_are_found_on_disk(sparse, options_of(cache), tmp_path, cached_tokens=320)


def test_pipelines_are_refused(sparse: Path) -> None:
    with pytest.raises(InputError, match="have indexers, whose keys are not divided"):
        LLM(sparse, pipeline_parallel_size=3, **OPTIONS)


def test_formats_of_indexers_differ_little(sparse: Path) -> None:
    """Keys of 8 bits select nearly the same tokens; the cost of 4 bits is larger, and that of no indexer is far off."""
    tokens = np.random.default_rng(8).integers(3, 512, 300).astype(np.int32)
    exact = LLM(sparse, **options_of(("bf16", "fp32"))).logits(tokens)
    loss = {}
    for name in ("bf16", "fp8", "int8", "int4", "nvfp4"):
        loss[name] = divergence(LLM(sparse, **options_of(("bf16", name))).logits(tokens), exact)
    assert max(loss["bf16"], loss["fp8"], loss["int8"]) < max(loss["int4"], loss["nvfp4"]), loss
