"""Kimi Linear, whose layers of Kimi Delta Attention have a state, and those of latent attention no rope: logits against
transformers, and the bits of every way to a token."""

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
from logits_oracle import (
    ISAS,
    TOKENS,
    Fault,
    assert_equals_on_isa,
    assert_equals_transformers,
    assert_noticed,
    edit_names,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport

from kvanta import LLM, SamplingParams
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError

MODELS: dict[str, dict[str, Any]] = {
    "default": {},
    "query latents": {"q_lora_rank": 48, "num_expert_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "more heads": {"linear_num_heads": 6, "linear_head_dim": 40, "linear_conv_kernel_dim": 2},
    "layers of the class": {"layer_types": None, "num_hidden_layers": 6},
}


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    model = tiny_models.make_model("KimiLinear", **MODELS[name])
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, tmp_path: Path) -> None:
    assert_equals_on_isa(isa, tiny_models.make_model("KimiLinear", linear_head_dim=40), tmp_path)


LINEAR = {
    "full_attn_layers": [2],
    "kda_layers": [1, 3, 4],
    "head_dim": 24,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}


def test_checkpoints_as_published(tmp_path: Path) -> None:
    """The layers' shapes are in an object, layers are counted from 1, and the first one has an mlp."""
    model = tiny_models.make_model("KimiLinear")
    tiny_models.save(model, tmp_path)
    removed = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    added = {"linear_attn_config": LINEAR, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid"}
    tiny_models.edit_config(tmp_path, **dict.fromkeys(removed, ...), **added, mla_use_nope=True)
    edit_names(tmp_path, lambda name: name.replace("layers.0.block_sparse_moe", "layers.0.mlp"))
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


ATTENTION = "model.layers.0.self_attn."
FAULTS: dict[str, Fault] = {
    "decay": ("KimiLinear", {}, edit_tensor(ATTENTION + "A_log", lambda x: x + 0.1)),
    "decays of channels": ("KimiLinear", {}, edit_tensor(ATTENTION + "dt_bias", lambda x: x.flip(0))),
    "convolution of keys": ("KimiLinear", {}, edit_tensor(ATTENTION + "k_conv1d.weight", lambda x: x.flip(2))),
    "beta": ("KimiLinear", {}, edit_tensor(ATTENTION + "b_proj.weight", lambda x: x.flip(0))),
    "output gate": ("KimiLinear", {}, edit_tensor(ATTENTION + "g_b_proj.weight", lambda x: x.flip(0))),
    "key without rope": (
        "KimiLinear",
        {},
        edit_tensor("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", lambda x: torch.cat([x[:32], -x[32:]])),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "16MiB", "threads": 2}
GREEDY = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("kimi")
    model = tiny_models.make_model(
        "KimiLinear", vocab_size=512, hidden_size=128, kv_lora_rank=64, max_position_embeddings=1024
    )
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


CACHES: list[dict[str, Any]] = [
    {"kv_cache_dtype": "bf16"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "int4", "state_cache_dtype": "int8", "state_grid": 64},
    {"kv_cache_dtype": "bf16", "state_cache_dtype": "int4", "state_grid": 128},
]


@pytest.mark.parametrize("cache", CACHES)
def test_chunks_and_decode_give_the_bits_of_one_pass(folder: Path, cache: dict[str, Any]) -> None:
    whole = LLM(folder, max_num_batched_tokens=512, **cache, **OPTIONS)
    parts = LLM(folder, max_num_batched_tokens=64, **cache, **OPTIONS)
    tokens = np.random.default_rng(3).integers(3, 512, 400).astype(np.int32)
    np.testing.assert_array_equal(parts.logits(tokens), whole.logits(tokens))
    output = parts.generate([tokens[:130].tolist()], GREEDY)[0].outputs[0].token_ids
    row = whole.logits(np.array(tokens[:130].tolist() + list(output)))
    assert [int(x) for x in row[129:-1].argmax(-1)] == list(output)


@pytest.mark.parametrize("cache", CACHES)
def test_prefix_hits_give_the_bits_of_a_cold_run(folder: Path, cache: dict[str, Any], tmp_path: Path) -> None:
    def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]

    random = np.random.default_rng(5)
    system = random.integers(3, 512, 200).tolist()
    prompts = [system + random.integers(3, 512, 110 + 50 * i).tolist() for i in range(3)]
    cold = LLM(folder, enable_prefix_caching=False, **cache, **OPTIONS)
    warm = LLM(folder, kv_cache_dir=str(tmp_path), **cache, **OPTIONS)
    expected = [generate(cold, [prompt])[0] for prompt in prompts]
    assert [generate(warm, [prompt])[0] for prompt in prompts] == expected
    longer = prompts[0] + list(expected[0]) + random.integers(3, 512, 30).tolist()
    after = generate(cold, [longer])
    assert generate(warm, [longer]) == after
    assert warm.stats()["cached_tokens"] > 0
    # All at once, in a cache that makes them wait and be computed again.
    small = LLM(folder, **cache, **OPTIONS | {"kv_cache_memory_bytes": "1MiB"})
    assert generate(small, [*prompts, longer]) == [*expected, *after]
    # From the disk, after a restart.
    del warm
    [found] = LLM(folder, kv_cache_dir=str(tmp_path), **cache, **OPTIONS).generate([longer], GREEDY)
    assert (tuple(found.outputs[0].token_ids),) == tuple(after)
    assert found.num_cached_tokens


def test_the_state_does_not_grow(folder: Path) -> None:
    groups = {group["visibility"]: group for group in LLM(folder, kv_cache_dtype="bf16", **OPTIONS).stats()["groups"]}
    assert groups["recurrent"]["layers"] == [0, 2, 3]
    assert groups["recurrent"]["page_bytes"] == 3 * 4 * (4 * 24 * 24 + 3 * 3 * 4 * 24)
    assert groups["full"]["page_bytes"] == 64 * (64 + 16) * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "at least one layer"),
        ({"layer_types": ["linear_attention"] * 3}, "one entry for each of 4 layers"),
        ({"linear_head_dim": 300}, "linear_head_dim"),
        ({"linear_head_dim": 20}, "a multiple of 8"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ({"mla_use_nope": False}, "latent attention without rope"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"moe_router_activation_func": "softmax"}, "sigmoid"),
        (
            {"layer_types": ..., "linear_attn_config": LINEAR | {"full_attn_layers": [0]}},
            "a list of layers from 1 to 4",
        ),
        ({"linear_attn_config": {"head_dim": 24}}, "linear_attn_config.num_heads"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    tiny_models.edit_config(tmp_path / "model", **changes)
    with pytest.raises(InputError, match=message):
        LLM(tmp_path / "model", **OPTIONS)


def test_a_tensor_that_is_missing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.2.self_attn.v_conv1d.weight"]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.layers\.2\.self_attn\.v_conv1d\.weight"):
        LLM(tmp_path / "model", **OPTIONS)
