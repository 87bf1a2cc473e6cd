"""Hybrids with layers of Mamba-2, Granite 4, Bamba, Falcon-H1, Nemotron-H and Nemotron 3: logits against transformers,
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
from logits_oracle import (
    TOKENS,
    Fault,
    assert_equals_transformers,
    assert_noticed,
    edit_config,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport

from kvanta import LLM, SamplingParams
from kvanta.calibration.checkpoint_copy import check_target
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError

LAYERS_OF_ONE_BLOCK = [*(["linear_attention"] * 2), "full_attention", "linear_attention", "mlp"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteMoeHybrid", {}),
    "granite_dense": ("GraniteMoeHybrid", {"num_local_experts": 0, "mamba_n_groups": 1, "mamba_d_conv": 2}),
    "granite_rope": ("GraniteMoeHybrid", {"position_embedding_type": "rope", "mamba_proj_bias": True}),
    "granite_limits": ("GraniteMoeHybrid", {"time_step_limit": [0.3, 0.9], "mamba_conv_bias": False}),
    "bamba": ("Bamba", {}),
    "bamba_biases": ("Bamba", {"attention_bias": True, "mlp_bias": True, "mamba_d_state": 8, "mamba_n_heads": 2}),
    "falcon": ("FalconH1", {}),
    "falcon_no_norm": ("FalconH1", {"mamba_rms_norm": False, "projectors_bias": True, "mlp_bias": True}),
    "falcon_gate_first": ("FalconH1", {"mamba_norm_before_gate": False, "mamba_d_ssm": 64, "num_hidden_layers": 3}),
    "nemotron": ("NemotronH", {}),
    "nemotron_experts": ("NemotronH", tiny_models.NEMOTRON_EXPERTS),
    "nemotron_latent_experts": (
        "NemotronH",
        tiny_models.NEMOTRON_EXPERTS
        | {"moe_latent_size": 40, "mlp_bias": True, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "nemotron_one_block": ("NemotronH", {"layers_block_type": LAYERS_OF_ONE_BLOCK, "mlp_bias": True, "use_bias": True}),
}
ARCHITECTURES = ["GraniteMoeHybrid", "Bamba", "FalconH1", "NemotronH"]


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    architecture, settings = MODELS[name]
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


def test_configs_as_published(tmp_path: Path) -> None:
    """transformers 4 wrote other kinds of layers, a pattern, and Python's Infinity."""
    granite, nemotron = tmp_path / "granite", tmp_path / "nemotron"
    model = tiny_models.make_model("GraniteMoeHybrid")
    tiny_models.save(model, granite)
    tiny_models.edit_config(granite, layer_types=["mamba", "attention", "mamba", "mamba"], mamba_d_head="auto")
    assert largest_error(logits(granite), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    model = tiny_models.make_model("NemotronH")
    tiny_models.save(model, nemotron)
    limits = {"time_step_limit": [0.0, float("inf")], "name": 'Infinity "Infinity'}
    tiny_models.edit_config(nemotron, layers_block_type=..., hybrid_override_pattern="M-M*-", **limits)
    assert "[0.0, Infinity]" in (nemotron / "config.json").read_text()
    assert largest_error(logits(nemotron), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    nemotron3 = tmp_path / "nemotron3"
    model = tiny_models.make_model("NemotronH", **tiny_models.NEMOTRON_EXPERTS)
    tiny_models.save(model, nemotron3)
    tiny_models.edit_config(nemotron3, layers_block_type=..., hybrid_override_pattern="MEM*E")
    assert largest_error(logits(nemotron3), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


FAULTS: dict[str, Fault] = {
    "D": ("GraniteMoeHybrid", {}, edit_tensor("model.layers.0.mamba.D", lambda x: x.flip(0))),
    "decay": ("Bamba", {}, edit_tensor("model.layers.2.mamba.A_log", lambda x: x + 0.1)),
    "bias of the convolution": ("Bamba", {}, edit_tensor("model.layers.0.mamba.conv1d.bias", lambda x: x.flip(0))),
    "gate": ("FalconH1", {}, edit_config(mamba_norm_before_gate=False)),
    "groups": ("FalconH1", {}, edit_config(mamba_rms_norm=True, ssm_multipliers=[0.7, 0.8, 1.2, 1.3, 0.7])),
    "factor of keys": ("FalconH1", {}, edit_config(key_multiplier=0.7)),
    "factor of gates": ("FalconH1", {}, edit_config(mlp_multipliers=[1.0, 0.3])),
    "limit": ("NemotronH", {}, edit_config(time_step_min=0.3)),
    "correction bias": (
        "NemotronH",
        tiny_models.NEMOTRON_EXPERTS,
        edit_tensor("backbone.layers.1.mixer.gate.e_score_correction_bias", lambda x: -x),
    ),
    "latents of experts": (
        "NemotronH",
        tiny_models.NEMOTRON_EXPERTS | {"moe_latent_size": 24},
        edit_tensor("backbone.layers.4.mixer.fc2_latent_proj.weight", lambda x: x.flip(0)),
    ),
    "order of layers": ("NemotronH", {}, edit_tensor("backbone.layers.4.norm.weight", lambda x: x.flip(0))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


WIDE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "mamba_d_ssm": 256,
    "mamba_head_dim": 32,
}
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "16MiB", "threads": 2}
GREEDY = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=[*ARCHITECTURES, "Nemotron3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tokenizer of stories260k, and heads that every format takes."""
    folder: Path = tmp_path_factory.mktemp("mamba2")
    has_experts = request.param == "Nemotron3"
    settings = WIDE | (tiny_models.NEMOTRON_EXPERTS | {"moe_latent_size": 64} if has_experts else {})
    model = tiny_models.make_model("NemotronH" if has_experts else request.param, **settings)
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


@pytest.mark.parametrize(("kv_cache_dtype", "chunk"), [("bf16", 64), ("int4", 128)])
def test_chunks_and_decode_give_the_bits_of_one_pass(folder: Path, kv_cache_dtype: str, chunk: int) -> None:
    whole = LLM(folder, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=512, **OPTIONS)
    parts = LLM(folder, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=chunk, **OPTIONS)
    tokens = np.random.default_rng(3).integers(3, 512, 400).astype(np.int32)
    np.testing.assert_array_equal(parts.logits(tokens), whole.logits(tokens))
    output = parts.generate([tokens[:130].tolist()], GREEDY)[0].outputs[0].token_ids
    row = whole.logits(np.array(tokens[:130].tolist() + list(output)))
    assert [int(x) for x in row[129:-1].argmax(-1)] == list(output)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "kivi4"])
def test_prefix_hits_give_the_bits_of_a_cold_run(folder: Path, kv_cache_dtype: str, tmp_path: Path) -> None:
    def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]

    random = np.random.default_rng(5)
    system = random.integers(3, 512, 200).tolist()
    prompts = [system + random.integers(3, 512, 110 + 50 * i).tolist() for i in range(3)]
    cold = LLM(folder, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, **OPTIONS)
    warm = LLM(folder, kv_cache_dtype=kv_cache_dtype, kv_cache_dir=str(tmp_path), **OPTIONS)
    expected = [generate(cold, [prompt])[0] for prompt in prompts]
    assert [generate(warm, [prompt])[0] for prompt in prompts] == expected
    assert warm.stats()["cached_tokens"] == 192, "the third prompt continues where the second one left the first"
    longer = prompts[0] + list(expected[0]) + random.integers(3, 512, 30).tolist()
    after = generate(cold, [longer])
    assert generate(warm, [longer]) == after
    # All at once, in a cache that makes them wait and be computed again.
    small = LLM(folder, kv_cache_dtype=kv_cache_dtype, **OPTIONS | {"kv_cache_memory_bytes": "2MiB"})
    assert generate(small, [*prompts, longer]) == [*expected, *after]
    # From the disk, after a restart.
    del warm
    again = LLM(folder, kv_cache_dtype=kv_cache_dtype, kv_cache_dir=str(tmp_path), **OPTIONS)
    [found] = again.generate([longer], GREEDY)
    assert (tuple(found.outputs[0].token_ids),) == tuple(after)
    assert found.num_cached_tokens is not None
    assert found.num_cached_tokens > 0


def test_scales_by_the_layers_of_the_checkpoint(tmp_path: Path) -> None:
    """Falcon-H1 and Nemotron-H have other numbers of layers in the cache than in the checkpoint."""
    for architecture, name, cached in (
        ("FalconH1", "model.layers.1.self_attn.{}_proj.{}_scale", 3),
        ("NemotronH", "backbone.layers.3.mixer.{}_proj.{}_scale", 2),
    ):
        folder = tmp_path / architecture
        tiny_models.save(tiny_models.make_model(architecture, **WIDE), folder, torch.bfloat16)
        file = folder / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        for side, scale in (("k", 0.02), ("v", 0.03)):
            tensors[name.format(side, side)] = torch.tensor([scale])
            if architecture == "FalconH1":
                tensors[name.replace(".1.", ".0.").format(side, side)] = torch.tensor([0.5])
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        layers = LLM(folder, tokenizer="stories260k", kv_cache_dtype="fp8", **OPTIONS).stats()["layers"]
        np.testing.assert_allclose(layers[cached]["k_scale"], [0.02] * 2)
        np.testing.assert_allclose(layers[cached]["v_scale"], [0.03] * 2)
        with pytest.raises(InputError, match="number layers otherwise than the cache does: write a scale file"):
            check_target(folder, tmp_path / "copy")


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GraniteMoeHybrid", {"layer_types": ["mamba"] * 4}, "at least one layer of full_attention"),
        ("GraniteMoeHybrid", {"layer_types": ["mamba"] * 3}, "one entry for each of 4 layers"),
        ("GraniteMoeHybrid", {"layer_types": ["sliding_attention"] * 4}, "'linear_attention' only"),
        ("GraniteMoeHybrid", {"mamba_n_groups": 3}, "a divisor of mamba_n_heads"),
        ("GraniteMoeHybrid", {"mamba_d_state": 300}, "mamba_d_state"),
        ("GraniteMoeHybrid", {"mamba_d_conv": 9}, "mamba_d_conv"),
        ("GraniteMoeHybrid", {"mamba_d_head": 8}, "128 / mamba_n_heads"),
        ("GraniteMoeHybrid", {"hidden_act": "gelu_pytorch_tanh"}, "silu, the activation of Mamba-2"),
        ("GraniteMoeHybrid", {"time_step_limit": [1.0, 0.5]}, "the smaller number first"),
        ("GraniteMoeHybrid", {"time_step_limit": ["a", 0.5]}, "two numbers of at least 0, or Infinity"),
        ("Bamba", {"attn_layer_indices": []}, "a list of layers from 0 to 3"),
        ("Bamba", {"attn_layer_indices": [4]}, "a list of layers from 0 to 3"),
        ("FalconH1", {"ssm_multipliers": [1.0]}, "a list of 5 numbers"),
        ("FalconH1", {"attention_bias": True}, "1 with attention_bias"),
        ("FalconH1", {"mamba_proj_bias": True}, "1 with mamba_proj_bias"),
        ("NemotronH", {"layers_block_type": ["moe", "linear_attention", "full_attention"]}, "no MLP or experts at"),
        ("NemotronH", {"layers_block_type": ["mlp", "linear_attention", "full_attention"]}, "no MLP or experts at"),
        ("NemotronH", {"layers_block_type": ["linear_attention"]}, "at least one layer of attention"),
        ("NemotronH", {"layers_block_type": ["window"]}, "a list of 'linear_attention', 'full_attention', 'mlp'"),
        ("NemotronH", {"layers_block_type": ..., "hybrid_override_pattern": "M?"}, "a string of 'M'"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ],
)
def test_bad_configs(architecture: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model(architecture), tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        LLM(tmp_path, tokenizer="stories260k", **OPTIONS)
