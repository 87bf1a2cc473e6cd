"""Kimi Linear and Ling 3.0, whose layers of Kimi Delta Attention have a state, and those of latent attention no rope or
gates of heads: logits against transformers, and the bits of every way to a token."""

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
    edit_config,
    edit_names,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport

from kvanta import LLM, SamplingParams
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError

KIMI, LING = "KimiLinear", "BailingHybrid"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi": (KIMI, {}),
    "kimi, query latents": (
        KIMI,
        {"q_lora_rank": 48, "num_expert_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "kimi, more heads": (KIMI, {"linear_num_heads": 6, "linear_head_dim": 40, "linear_conv_kernel_dim": 2}),
    "kimi, layers of the class": (KIMI, {"layer_types": None, "num_hidden_layers": 6}),
    "ling": (LING, {}),
    "ling, another bound": (LING, {"kda_lower_bound": -0.5, "head_dim": 40, "short_conv_kernel_size": 2}),
    "ling, no bound": (LING, {"kda_safe_gate": False, "norm_topk_prob": False}),
    "ling, layers of the class": (LING, {"layer_types": None, "layer_group_size": 3, "attention_bias": True}),
    "ling, yarn": (
        LING,
        {
            "rope_theta": 1e4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 40,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    architecture, settings = MODELS[name]
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("architecture", "settings"), [(KIMI, {"linear_head_dim": 40}), (LING, {"head_dim": 40})])
def test_every_instruction_set(isa: str, architecture: str, settings: dict[str, Any], tmp_path: Path) -> None:
    assert_equals_on_isa(isa, tiny_models.make_model(architecture, **settings), tmp_path)


LINEAR = {
    "full_attn_layers": [2],
    "kda_layers": [1, 3, 4],
    "head_dim": 24,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
}


def test_checkpoints_as_published(tmp_path: Path) -> None:
    """Kimi's: the layers' shapes are in an object, layers are counted from 1, and the first one has an mlp."""
    model = tiny_models.make_model(KIMI)
    tiny_models.save(model, tmp_path)
    removed = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    added = {"linear_attn_config": LINEAR, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid"}
    tiny_models.edit_config(tmp_path, **dict.fromkeys(removed, ...), **added, mla_use_nope=True)
    edit_names(tmp_path, lambda name: name.replace("layers.0.block_sparse_moe", "layers.0.mlp"))
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


def test_ling_as_published(tmp_path: Path) -> None:
    """A head's channels are in head_dim, which transformers writes anew; layers follow from the group's size."""
    model = tiny_models.make_model(LING, layer_types=None, layer_group_size=3)
    tiny_models.save(model, tmp_path)
    removed = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    tiny_models.edit_config(tmp_path, **dict.fromkeys(removed, ...), head_dim=24)
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


ATTENTION = "model.layers.0.self_attn."
OF_LING = "model.layers.0.attention."
FAULTS: dict[str, Fault] = {
    "decay": (KIMI, {}, edit_tensor(ATTENTION + "A_log", lambda x: x + 0.1)),
    "decays of channels": (KIMI, {}, edit_tensor(ATTENTION + "dt_bias", lambda x: x.flip(0))),
    "convolution of keys": (KIMI, {}, edit_tensor(ATTENTION + "k_conv1d.weight", lambda x: x.flip(2))),
    "beta": (KIMI, {}, edit_tensor(ATTENTION + "b_proj.weight", lambda x: x.flip(0))),
    "output gate": (KIMI, {}, edit_tensor(ATTENTION + "g_b_proj.weight", lambda x: x.flip(0))),
    "key without rope": (
        KIMI,
        {},
        edit_tensor("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", lambda x: torch.cat([x[:32], -x[32:]])),
    ),
    "bound of decays": (LING, {}, edit_config(kda_lower_bound=-4.5)),
    "decays without a bound": (LING, {}, edit_config(kda_safe_gate=False)),
    "rate of decays": (LING, {}, edit_tensor(OF_LING + "A_log", lambda x: x + 0.1)),
    "projected decays": (LING, {}, edit_tensor(OF_LING + "f_proj.weight", lambda x: x.flip(0))),
    "projected gates": (LING, {}, edit_tensor(OF_LING + "g_proj.weight", lambda x: x.flip(0))),
    "gates of heads": (LING, {}, edit_tensor("model.layers.1.attention.g_proj.weight", lambda x: x.flip(0))),
    "rotated key": (
        LING,
        {},
        edit_tensor("model.layers.1.attention.kv_a_proj_with_mqa.weight", lambda x: torch.cat([x[:32], -x[32:]])),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "16MiB", "threads": 2}
GREEDY = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


def make_folder(tmp_path_factory: pytest.TempPathFactory, architecture: str) -> Path:
    folder: Path = tmp_path_factory.mktemp(architecture)
    model = tiny_models.make_model(
        architecture, vocab_size=512, hidden_size=128, kv_lora_rank=64, max_position_embeddings=1024
    )
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory, KIMI)


@pytest.fixture(scope="module")
def ling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory, LING)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_lower_bound": 0}, "a number below 0"),
        ({"kda_lower_bound": 5}, "kda_lower_bound"),
        ({"layer_types": ..., "layer_group_size": 5}, "at least one layer"),
        ({"linear_head_dim": 20}, "a multiple of 8"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
    ],
)
def test_bad_configs_of_ling(changes: dict[str, Any], message: str, ling: Path, tmp_path: Path) -> None:
    shutil.copytree(ling, tmp_path / "model")
    tiny_models.edit_config(tmp_path / "model", **changes)
    with pytest.raises(InputError, match=message):
        LLM(tmp_path / "model", **OPTIONS)
