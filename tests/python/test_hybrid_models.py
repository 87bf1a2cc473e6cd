"""Qwen3-Next and Qwen3.5, whose layers of Gated DeltaNet have a state, and LFM2 with that of short convolutions: logits
against transformers, and the bits of every way to a token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
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
    edit_config,
    edit_tensor,
    largest_error,
    logits,
)
from model_support import RecordSupport

from kvanta import LLM, SamplingParams
from kvanta.calibration import calibrate, write_scale_file
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.errors import InputError
from kvanta.evaluate import Evaluation, Settings, evaluate
from kvanta.evaluate.engine_factory import EngineFactory
from kvanta.evaluate.search import Search
from kvanta.fleet.plan import plan

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {}),
    "qwen3_next_interval": ("Qwen3Next", {"layer_types": None, "num_hidden_layers": 5, "decoder_sparse_step": 2}),
    "qwen3_next_one_value_head": ("Qwen3Next", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}),
    "qwen3_5": ("Qwen3_5", {}),
    "qwen3_5_wide_heads": (
        "Qwen3_5",
        {"linear_value_head_dim": 72, "linear_key_head_dim": 40, "attention_bias": True, "linear_conv_kernel_dim": 5},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", {}),
    "lfm2": ("Lfm2", {}),
    "lfm2_biases": (
        "Lfm2",
        {"conv_bias": True, "conv_L_cache": 5, "block_ffn_dim_multiplier": 1.3, "tie_word_embeddings": True},
    ),
    "lfm2_whole_width": (
        "Lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "hidden_size": 72,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "conv_L_cache": 2,
        },
    ),
    "lfm2_moe": ("Lfm2Moe", {"routed_scaling_factor": 1.7}),
    "lfm2_moe_without_bias": ("Lfm2Moe", {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0}),
}
PROMPT = [int(token) for token in TOKENS]


@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_equal_transformers(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    architecture, settings = MODELS[name]
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, tmp_path)
    assert_equals_transformers(model, tmp_path)
    record_support(tmp_path, "F32")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set(isa: str, tmp_path: Path) -> None:
    assert_equals_on_isa(isa, tiny_models.make_model("Qwen3_5", linear_value_head_dim=72), tmp_path)


@pytest.mark.parametrize("architecture", tiny_models.HYBRIDS)
def test_bf16_is_no_farther_from_float32_than_transformers(
    architecture: str, tmp_path: Path, record_support: RecordSupport
) -> None:
    record_support(assert_bf16_is_near(architecture, tmp_path, {}), "BF16")


@pytest.mark.parametrize("with_experts", [False, True])
def test_language_model_of_multimodal_checkpoints(
    with_experts: bool, tmp_path: Path, record_support: RecordSupport
) -> None:
    model = tiny_multimodal.make_qwen35_multimodal(with_experts)
    tiny_models.save(model, tmp_path)
    found = logits(tmp_path)
    assert largest_error(found, tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS
    record_support(tmp_path, "F32")


def test_experts_of_one_tensor(tmp_path: Path) -> None:
    """The hub's Qwen3.5 has the matrices of all experts in one tensor."""
    model = tiny_models.make_model("Qwen3_5Moe")
    tiny_models.save(model, tmp_path)
    expected = tiny_models.expected_logits(model, TOKENS)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    fused = {name: value for name, value in tensors.items() if ".mlp.experts." not in name}
    for name, value in model.state_dict().items():
        if ".mlp.experts." in name:
            fused[name] = value.contiguous()
    safetensors.torch.save_file(fused, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert largest_error(logits(tmp_path), expected) < tolerance.F32_LOGITS


FAULTS: dict[str, Fault] = {
    "interval": ("Qwen3_5", {}, edit_config(layer_types=["linear_attention"] * 3 + ["full_attention"])),
    "decay": ("Qwen3_5", {}, edit_tensor("model.layers.0.linear_attn.A_log", lambda x: x + 0.1)),
    "dt_bias": ("Qwen3Next", {}, edit_tensor("model.layers.0.linear_attn.dt_bias", lambda x: x.flip(0))),
    "convolution": ("Qwen3_5", {}, edit_tensor("model.layers.2.linear_attn.conv1d.weight", lambda x: x.flip(2))),
    "gated norm": ("Qwen3_5Moe", {}, edit_tensor("model.layers.3.linear_attn.norm.weight", lambda x: x - 1)),
    "order of b and a": (
        "Qwen3Next",
        {},
        edit_tensor("model.layers.0.linear_attn.in_proj_ba.weight", lambda x: x.flip(0)),
    ),
    "taps": ("Lfm2", {}, edit_tensor("model.layers.0.conv.conv.weight", lambda x: x.flip(2))),
    "order of B, C and x": ("Lfm2", {}, edit_tensor("model.layers.2.conv.in_proj.weight", lambda x: x.roll(64, 0))),
    "expert bias": ("Lfm2Moe", {}, edit_tensor("model.layers.3.feed_forward.expert_bias", lambda x: -x)),
    "epsilon of norms": ("Lfm2", {}, edit_config(norm_eps=1e-3)),
    "gate": ("Qwen3_5", {}, edit_tensor("model.layers.1.self_attn.q_proj.weight", lambda x: x.roll(16, 0))),
}


@pytest.mark.parametrize("name", [name for name in FAULTS if name != "interval"])
def test_faults_are_noticed(name: str, tmp_path: Path) -> None:
    assert_noticed(FAULTS[name], tmp_path)


def save_with_tokenizer(architecture: str, folder: Path) -> Path:
    """With the tokenizer of stories260k, and heads that every format takes."""
    settings = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 1024}
    model = tiny_models.make_model(architecture, **settings)
    tiny_models.save(model, folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_tokenizer("Qwen3_5", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module", params=["Qwen3_5", "Lfm2Moe"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each kind of state."""
    return save_with_tokenizer(request.param, tmp_path_factory.mktemp(request.param))


OPTIONS: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": "16MiB", "threads": 2}
GREEDY = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int4"])
@pytest.mark.parametrize("chunk", [64, 128, 512])
def test_chunks_and_decode_give_the_bits_of_one_pass(hybrid: Path, kv_cache_dtype: str, chunk: int) -> None:
    whole = LLM(hybrid, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=512, **OPTIONS)
    parts = LLM(hybrid, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=chunk, **OPTIONS)
    tokens = np.random.default_rng(3).integers(3, 512, 400).astype(np.int32)
    np.testing.assert_array_equal(parts.logits(tokens), whole.logits(tokens))
    output = parts.generate([tokens[:130].tolist()], GREEDY)[0].outputs[0].token_ids
    row = whole.logits(np.array(tokens[:130].tolist() + list(output)))
    assert [int(x) for x in row[129:-1].argmax(-1)] == list(output)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8", "kivi4"])
def test_prefix_hits_give_the_bits_of_a_cold_run(hybrid: Path, kv_cache_dtype: str) -> None:
    def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY)]

    random = np.random.default_rng(5)
    system = random.integers(3, 512, 200).tolist()
    prompts = [system + random.integers(3, 512, 110 + 50 * i).tolist() for i in range(3)]
    cold = LLM(hybrid, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False, **OPTIONS)
    warm = LLM(hybrid, kv_cache_dtype=kv_cache_dtype, **OPTIONS)
    expected = [generate(cold, [prompt])[0] for prompt in prompts]
    found = [generate(warm, [prompt])[0] for prompt in prompts]
    assert found == expected
    hits = warm.stats()["cached_tokens"]
    assert hits == 192, "the third prompt continues where the second one left the first"
    # A conversation: the answer is part of the next prompt.
    longer = prompts[0] + list(expected[0]) + random.integers(3, 512, 30).tolist()
    assert generate(warm, [longer]) == generate(cold, [longer])
    assert warm.stats()["cached_tokens"] - hits >= (len(longer) - 30 - 1) // 64 * 64 - 64
    # All at once, in a cache that makes them wait and be computed again.
    small = LLM(hybrid, kv_cache_dtype=kv_cache_dtype, **OPTIONS | {"kv_cache_memory_bytes": "700KiB"})
    assert generate(small, [*prompts, longer]) == [*expected, generate(cold, [longer])[0]]


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "kivi4"])
def test_states_are_found_on_disk_after_a_restart(hybrid: Path, kv_cache_dtype: str, tmp_path: Path) -> None:
    random = np.random.default_rng(6)
    prompt = random.integers(3, 512, 330).tolist()
    options = OPTIONS | {"kv_cache_dtype": kv_cache_dtype, "kv_cache_dir": str(tmp_path)}
    [cold] = LLM(hybrid, **options).generate([prompt], GREEDY)
    history = prompt + list(cold.outputs[0].token_ids) + random.integers(3, 512, 20).tolist()
    [found] = LLM(hybrid, **options).generate([history], GREEDY)
    assert found.num_cached_tokens == (330 + 90 - 1) // 64 * 64, "continues from the last page's state"
    [expected] = LLM(hybrid, **OPTIONS, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False).generate(
        [history], GREEDY
    )
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_state_does_not_grow(hybrid: Path) -> None:
    """A hybrid's cache: pages of one layer of attention, and two states."""
    groups = LLM(hybrid, kv_cache_dtype="bf16", **OPTIONS).stats()["groups"]
    kinds = {group["visibility"]: group for group in groups}
    assert set(kinds) == {"recurrent", "full"}
    assert kinds["recurrent"]["layers"] == [0, 2, 3]
    is_delta_net = hybrid.name.startswith("Qwen3_5")
    state = 4 * (6 * 16 * 24 + 3 * (2 * 2 * 16 + 6 * 24)) if is_delta_net else 4 * 2 * 128
    assert kinds["recurrent"]["page_bytes"] == 3 * -(-state // 64) * 64
    assert kinds["full"]["page_bytes"] == 64 * 2 * 2 * 32 * 2
    sizes = [plan(str(hybrid), 1 << 30, ["bf16"], context)["formats"][0]["sequence_bytes"] for context in (512, 1024)]
    assert sizes[1] - sizes[0] == 8 * kinds["full"]["page_bytes"], "eight pages of attention, and no more states"


def test_scales_of_the_layers_of_attention(folder: Path, tmp_path: Path) -> None:
    """As FP8 checkpoints have them: recurrent layers have none."""
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for side, scale in (("k", 0.02), ("v", 0.03)):
        tensors[f"model.layers.1.self_attn.{side}_proj.{side}_scale"] = torch.tensor([scale])
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    layers = LLM(tmp_path / "model", kv_cache_dtype="fp8", **OPTIONS).stats()["layers"]
    np.testing.assert_allclose(layers[1]["k_scale"], [0.02] * 2)
    np.testing.assert_allclose(layers[1]["v_scale"], [0.03] * 2)
    assert not layers[0]["k_scale"]


def test_boundary_layers_are_counted_among_those_of_attention(folder: Path) -> None:
    layers = LLM(folder, kv_cache_dtype="int8+edges=1", **OPTIONS).stats()["layers"]
    assert [layer["scheme"] for layer in layers] == ["bf16"] * 4
    layers = LLM(folder, kv_cache_dtype="int8", kv_cache_dtype_layers="1=int4", **OPTIONS).stats()["layers"]
    assert layers[1]["scheme"].startswith("int4")
    assert layers[0]["scheme"] == "bf16"


def test_calibration_and_evaluation(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANTA_HOME", str(tmp_path))
    options: dict[str, Any] = {"max_model_len": 192, "kv_cache_memory_bytes": "8MiB", "threads": 1}
    reader = LLM(folder, kv_cache_dtype="bf16", **options)
    scales = calibrate(reader, np.random.default_rng(11).integers(3, 512, 150), granularity="head")
    write_scale_file(tmp_path / "scales.json", scales, reader.model_info)
    llm = LLM(folder, kv_cache_dtype="fp8", quantization_param_path=str(tmp_path / "scales.json"), **options)
    np.testing.assert_array_equal(llm.stats()["layers"][1]["k_scale"], scales.k_scale[1])
    settings = Settings(formats=["int8", "int4"], context=128, tokens=256, engine={"threads": 1})
    rows = evaluate(str(folder), settings)["formats"]
    assert all(0 < row["kl_mean"] < 0.5 for row in rows.values()), rows
    passages = Evaluation(str(folder), settings).calibration_passages(64)
    factory = EngineFactory.find(str(folder), 128, 1, {"threads": 1})
    search = Search(factory, passages, [6.0], ["int8", "int4"])
    assert search._cached == [1]  # states have no format
    (found,) = search.run()
    assert found.bits_per_element <= 6.0


def test_query_matrices_of_the_layers_of_attention(folder: Path, tmp_path: Path) -> None:
    """A calibration's file has matrices of recurrent layers, too, which nobody reads."""
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": "8MiB", "threads": 1}
    reader = LLM(folder, kv_cache_dtype="bf16", **options)
    file = tmp_path / "query.safetensors"
    tokens = np.random.default_rng(12).integers(3, 512, 8192)
    write_scale_file(file, calibrate(reader, tokens, query=True), reader.model_info)
    for kv_cache_dtype in ("int4+query", "klt3"):
        llm = LLM(folder, kv_cache_dtype=kv_cache_dtype, quantization_param_path=str(file), **options)
        assert [layer["scheme"] for layer in llm.stats()["layers"]] == ["bf16", kv_cache_dtype, "bf16", "bf16"]


def test_first_checkpoints_of_lfm2(tmp_path: Path) -> None:
    """Other names of keys, and the layers of attention by their numbers."""
    model = tiny_models.make_model("Lfm2", block_multiple_of=24)
    tiny_models.save(model, tmp_path)
    tiny_models.as_first_generation(tmp_path)
    tiny_models.edit_config(
        tmp_path,
        intermediate_size=...,
        tie_word_embeddings=...,
        block_ff_dim=model.config.intermediate_size,
        tie_embedding=False,
        full_attn_idxs=[1],
    )
    assert largest_error(logits(tmp_path), tiny_models.expected_logits(model, TOKENS)) < tolerance.F32_LOGITS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_L_cache": 9}, "conv_L_cache"),
        ({"conv_L_cache": 1}, "conv_L_cache"),
        ({"layer_types": ["conv"] * 4}, "at least one layer"),
        ({"layer_types": ["linear_attention"] * 4}, "'full_attention' and 'conv' only"),
        ({"layer_types": ...}, "layer_types"),
        ({"num_dense_layers": 5}, "num_dense_layers"),
    ],
)
def test_bad_configs_of_lfm2(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("Lfm2Moe"), tmp_path)
    tiny_models.edit_config(tmp_path, **changes)
    with pytest.raises(InputError, match=message):
        logits(tmp_path)


@pytest.mark.parametrize("numbers", [[4], [-1], [True], 2, []])
def test_layers_of_attention_that_do_not_exist(numbers: Any, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.make_model("Lfm2"), tmp_path)
    tiny_models.edit_config(tmp_path, layer_types=..., full_attn_idxs=numbers)
    with pytest.raises(InputError, match=r"full_attn_idxs|at least one layer"):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 5}, "multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": 300}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim"),
        ({"layer_types": ["linear_attention"] * 4}, "at least one layer"),
        ({"layer_types": ["linear_attention"] * 3}, "one entry for each of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "'linear_attention' only"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    tiny_models.edit_config(tmp_path / "model", **changes)
    with pytest.raises(InputError, match=message):
        LLM(tmp_path / "model", **OPTIONS)
