"""DeepSeek V4, whose attention reads a window and compressed entries of the tokens before: logits against transformers,
and the bits of every way to a token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import tiny_models
import tolerance
import torch
from deepseek_v4_weights import save_published
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
    edit_names,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport
from sparse_runs import (
    assert_chunks_equal_one_pass,
    assert_hits_and_preemptions_equal_a_cold_run,
    assert_pages_are_found_on_disk,
    generate,
)

from kvanta import LLM
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError
from kvanta.fleet.plan import plan

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "all_kinds": {},
    "below_the_threshold": {"index_topk": 40},
    "at_the_threshold": {"index_topk": 37},
    "one_entry": {"index_topk": 1, "index_n_heads": 20},
    "windows_alone": {"layer_types": ["sliding_attention"] * 4},
    "long_entries": {"layer_types": [HEAVY] * 4, "compress_rates": {SPARSE: 4, HEAVY: 128}},
    "short_entries": {"layer_types": [SPARSE] * 4, "compress_rates": {SPARSE: 2, HEAVY: 8}, "index_topk": 20},
    "yarn": {"rope_parameters": YARN},
    "one_stream": {"hc_mult": 1},
    "many_streams": {"hc_mult": 5, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3},
    "cut_off_experts": {"swiglu_limit": 0.4},
    "experts_by_token": {"mlp_layer_types": ["hash_moe"] * 4},
    "experts_by_score": {"mlp_layer_types": ["moe"] * 4},
    "one_group": {"o_groups": 1},
    "short_window": {"sliding_window": 1},
    "window_of_pages": {"sliding_window": 130},
}
LAYER = "model.layers.1."


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_models.make_model("DeepseekV4", **MODELS[name])
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("settings", [{"layer_types": [HEAVY]}, {"layer_types": [SPARSE], "index_topk": 1030}])
def test_more_rows_than_a_split(settings: dict[str, Any], tmp_path: Path) -> None:
    """Queries that attend to more than 1,024 entries."""
    settings |= {"num_hidden_layers": 1, "mlp_layer_types": ["moe"], "max_position_embeddings": 4096}
    model = tiny_models.make_model("DeepseekV4", compress_rates={SPARSE: 2, HEAVY: 2}, **settings)
    tiny_models.save(model, tmp_path)
    tokens = np.random.default_rng(4).integers(0, tiny_models.VOCAB, 2200).astype(np.int32)
    expected = tiny_models.expected_logits(model, tokens)
    found = logits(tmp_path, tokens=tokens, max_model_len=2304, max_num_batched_tokens=512)
    assert largest_error(found, expected) < tolerance.F32_LOGITS
    assert divergence(found, expected) < tolerance.F32_DIVERGENCE


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, tmp_path: Path) -> None:
    assert_equals_on_isa(isa, tiny_models.make_model("DeepseekV4"), tmp_path)


def test_bf16_is_no_farther_from_float32_than_transformers(tmp_path: Path, record_support: RecordSupport) -> None:
    record_support(assert_bf16_is_near("DeepseekV4", tmp_path, {}), "BF16")


ATTENTION = LAYER + "attn."
FAULTS: dict[str, Fault] = {
    "one entry less": ("DeepseekV4", {}, edit_config(index_topk=7)),
    "queries of the indexer": (
        "DeepseekV4",
        {},
        edit_tensor(ATTENTION + "indexer.wq_b.weight", lambda x: x.roll(32, 0)),
    ),
    "keys of the indexer": (
        "DeepseekV4",
        {},
        edit_tensor(ATTENTION + "indexer.compressor.wkv.weight", lambda x: x.roll(1, 0)),
    ),
    "gates of entries": ("DeepseekV4", {}, edit_tensor(ATTENTION + "compressor.wgate.weight", torch.zeros_like)),
    "series of entries": ("DeepseekV4", {}, edit_tensor(ATTENTION + "compressor.wkv.weight", lambda x: x.roll(32, 0))),
    "places in an entry": ("DeepseekV4", {}, edit_tensor(ATTENTION + "compressor.ape", lambda x: x.flip(0))),
    "sinks": ("DeepseekV4", {}, edit_tensor(ATTENTION + "attn_sink", torch.zeros_like)),
    "groups of heads": ("DeepseekV4", {}, edit_tensor(ATTENTION + "wo_a.weight", lambda x: x.roll(24, 0))),
    "window": ("DeepseekV4", {}, edit_config(sliding_window=23)),
    "tokens of long entries": ("DeepseekV4", {}, edit_config(**{"rope_parameters.compress.rope_theta": 10000.0})),
    "experts of tokens": (
        "DeepseekV4",
        {},
        edit_tensor("model.layers.0.ffn.gate.tid2eid", lambda x: x.roll(1, 0)),
    ),
    "correction of experts": ("DeepseekV4", {}, edit_tensor(LAYER + "ffn.gate.bias", torch.zeros_like)),
    "mixture of streams": ("DeepseekV4", {}, edit_tensor(LAYER + "hc_attn_base", lambda x: x.roll(1, 0))),
    "one iteration": ("DeepseekV4", {}, edit_config(hc_sinkhorn_iters=1)),
    "last streams": ("DeepseekV4", {}, edit_tensor("model.hc_head.hc_base", lambda x: x.roll(1, 0))),
    "limit of gates": ("DeepseekV4", {"swiglu_limit": 0.4}, edit_config(swiglu_limit=0.6)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


def published_name(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def test_published_names_and_keys(tmp_path: Path) -> None:
    model = tiny_models.make_model("DeepseekV4", compress_rates={SPARSE: 4, HEAVY: 128}, rope_parameters=YARN)
    tiny_models.save(model, tmp_path)
    edit_names(tmp_path, published_name)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    table = "layers.0.ffn.gate.tid2eid"
    tensors |= {table: tensors[table].int(), "mtp.0.attn.wkv.weight": torch.zeros(2, 2)}
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    tiny_models.edit_config(
        tmp_path,
        layer_types=...,
        compress_rates=...,
        compress_ratios=[0, 4, 128, 4, 4],
        mlp_layer_types=...,
        num_hash_layers=1,
        partial_rotary_factor=...,
        qk_rope_head_dim=16,
        rope_parameters=...,
        rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
    )
    assert_equals_transformers(model, tmp_path)


def test_published_weights(tmp_path: Path, record_support: RecordSupport) -> None:
    save_published(tmp_path / "published", tmp_path / "twin")
    twin = tiny_models.load(tmp_path / "twin", torch.float32)
    assert_equals_transformers(twin, tmp_path / "published")
    kept = LLM(tmp_path / "published", tokenizer="stories260k", dtype="bfloat16", max_model_len=150, threads=2)
    expanded = plan(str(tmp_path / "twin"), 1 << 30)["weight_bytes"]
    assert kept.stats()["weight_bytes"] < 0.6 * expanded, "codes are kept"
    assert divergence(kept.logits(TOKENS), tiny_models.expected_logits(twin, TOKENS)) < 0.05
    record_support(tmp_path / "published", "fp8_blocks")
    record_support(tmp_path / "published", "mxfp4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"] * 4}, "sliding_attention, compressed_sparse_attention or"),
        ({"layer_types": ["sliding_attention"]}, "for each of 4 layers"),
        ({"compress_rates": {SPARSE: 1}}, "compress_rates.compressed_sparse_attention"),
        ({"compress_rates": {SPARSE: 4, HEAVY: 48}}, "entries of 48 tokens with a page size of 64: one must divide"),
        ({"compress_rates": {SPARSE: 8, HEAVY: 32}}, "keys of 8 tokens each need pages of at least 128"),
        ({"o_groups": 3}, "a divisor of num_attention_heads"),
        ({"index_head_dim": 8}, "at least the 16 rotated channels"),
        ({"scoring_func": "softmax"}, "sqrtsoftplus"),
        ({"mlp_layer_types": ["dense"] * 4}, "'hash_moe' or 'moe'"),
        ({"hc_mult": 17}, "hc_mult"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "default or yarn"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("DeepseekV4"), tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        logits(tmp_path)


def test_experts_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("DeepseekV4"), tmp_path)
    edit_tensor("model.layers.0.ffn.gate.tid2eid", lambda x: x + 1)(tmp_path)
    with pytest.raises(InputError, match="tid2eid: expert 8 of token"):
        logits(tmp_path)


def test_plan_counts_the_parameters(tmp_path: Path) -> None:
    model = tiny_models.make_model("DeepseekV4")
    tiny_models.save(model, tmp_path)
    buffers = sum(x.numel() for name, x in model.named_buffers() if name.endswith(("correction_bias", "tid2eid")))
    expected = sum(parameter.numel() for parameter in model.parameters()) + buffers
    assert plan(str(tmp_path), 2**30)["parameters"] == expected


# ---- the cache


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of stories260k, and rows that every format takes."""
    folder = tmp_path_factory.mktemp("deepseek_v4")
    rates = {SPARSE: 4, HEAVY: 128}
    settings: dict[str, Any] = {"vocab_size": 512, "max_position_embeddings": 1024, "head_dim": 128}
    model = tiny_models.make_model("DeepseekV4", **settings, compress_rates=rates, partial_rotary_factor=0.25)
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "32MiB", "threads": 2}
CACHES = [("bf16", "auto"), ("fp8", "auto"), ("int8", "int8"), ("int4", "int4"), ("nvfp4", "fp8")]


def options_of(cache: tuple[str, str], **others: Any) -> dict[str, Any]:
    return {**OPTIONS, "kv_cache_dtype": cache[0], "indexer_cache_dtype": cache[1], **others}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("chunk", [64, 100])
def test_chunks_and_decode_give_the_bits_of_one_pass(compressed: Path, cache: tuple[str, str], chunk: int) -> None:
    assert_chunks_equal_one_pass(compressed, options_of(cache), chunk)


@pytest.mark.parametrize("cache", CACHES)
def test_prefix_hits_and_preemptions_give_the_bits_of_a_cold_run(compressed: Path, cache: tuple[str, str]) -> None:
    assert_hits_and_preemptions_equal_a_cold_run(compressed, options_of(cache), rounds=2, cached_tokens=3 * 128)


def test_entries_keys_and_inputs_are_groups_of_their_own(compressed: Path) -> None:
    stats = LLM(compressed, **options_of(("fp8", "auto"))).stats()
    windows, entries, inputs = stats["groups"]
    assert windows["layers"] == [0, 1, 2, 3]
    # Keys and entries of layer 1, entries of layer 2, keys and entries of layer 3; between them inputs.
    assert entries["layers"] == [4, 5, 7, 9, 10]
    assert inputs["layers"] == [6, 8, 11]
    row = 128 + 4  # channels and a scale
    assert windows["page_bytes"] == 4 * 64 * row
    keys = 16 * (32 + 4)  # of a page: 16 entries of 4 tokens
    assert entries["page_bytes"] == 2 * (keys + 16 * row) + 128 + 16, "one of 128 tokens, its scale in 16 bytes"
    floats = 2 * 8 * 2 * 2 * (128 + 32) + 128 * 2 * 128
    assert inputs["page_bytes"] == 4 * floats


@pytest.mark.parametrize("cache", [("bf16", "auto"), ("int8", "fp8")])
def test_pages_are_found_on_disk_after_a_restart(compressed: Path, cache: tuple[str, str], tmp_path: Path) -> None:
    assert_pages_are_found_on_disk(compressed, options_of(cache), tmp_path, cached_tokens=64)


def test_quantized_entries_differ_little(compressed: Path) -> None:
    tokens = np.random.default_rng(8).integers(3, 512, 300).astype(np.int32)
    exact = LLM(compressed, **options_of(("fp32", "fp32"))).logits(tokens)
    loss = {}
    for name in ("bf16", "fp8", "int8", "int4", "nvfp4"):
        loss[name] = divergence(LLM(compressed, **options_of((name, "fp32"))).logits(tokens), exact)
    assert loss["bf16"] < loss["int8"] < loss["int4"], loss
    assert loss["fp8"] < min(loss["int4"], loss["nvfp4"]), loss


def test_quality_is_measured(compressed: Path) -> None:
    prompt = np.random.default_rng(10).integers(3, 512, 200).tolist()
    llm = LLM(compressed, **options_of(("int8", "fp8"), quality_sample_rate=1.0))
    (output,) = generate(llm, [prompt])
    tokens = np.array(prompt + list(output), dtype=np.int32)
    exact = LLM(compressed, **options_of(("bf16", "bf16"))).logits(tokens)
    expected = divergence(llm.logits(tokens)[199:-1], exact[199:-1])
    assert llm.measure_quality()["kl_mean"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "are not divided among the ranks of a pipeline yet; use 1, or tensor_parallel"),
        (
            {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "which has compressed keys and values, with tensor_parallel_size = 2; there is: 1",
        ),
        ({"kv_cache_dtype": "int8,ages"}, "ages"),
        ({"kv_cache_dtype": "int4+exact=2"}, "without exact pages"),
        ({"block_size": 32}, "page size 32: an indexer's keys of 4 tokens each need pages of at least 64"),
    ],
)
def test_what_is_not_supported_is_refused(compressed: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LLM(compressed, **{**OPTIONS, **options})
