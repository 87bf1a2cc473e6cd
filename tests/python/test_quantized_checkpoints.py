"""Checkpoints with quantized weights, in the layouts of their producers, against their dequantized twins."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints as layouts
import quantized_packing
import safetensors.torch
import tiny_models
import tolerance
import torch
from logits_oracle import largest_error
from model_support import RecordSupport
from numpy.typing import NDArray

import kvanta
from kvanta.errors import InputError
from kvanta.fleet.plan import plan

TOKENS = np.random.default_rng(3).integers(0, tiny_models.VOCAB, 70).astype(np.int32)
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "head_dim": 16,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # all: rounding must not choose others
    "n_shared_experts": 1,
    "moe_intermediate_size": 192,
    "n_group": 1,
    "topk_group": 1,
}


def make_source(folder: Path, architecture: str = "Llama", **settings: Any) -> Path:
    tiny_models.save(tiny_models.make_model(architecture, **{**SIZES, **settings}), folder, torch.bfloat16)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("llama"))


def load(folder: Path, **options: Any) -> kvanta.LLM:
    settings = {"kv_cache_dtype": "fp32", "max_model_len": 128, "threads": 2, **options}
    return kvanta.LLM(folder, tokenizer="stories260k", **settings)


def expected_logits(twin: Path) -> NDArray[np.float32]:
    return tiny_models.expected_logits(tiny_models.load(twin, torch.float32), TOKENS)


def rounding_cost(twin: Path, expected: NDArray[np.float32]) -> float:
    """The error of rounding x of every linear layer to bf16, which AMX tiles do; f32 x errs less."""
    model = tiny_models.load(twin, torch.float32)
    return rms(tiny_models.rounded_logits(model, TOKENS, torch.bfloat16, torch.float32), expected)


def rms(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


def check(folder: Path, twin: Path, kept: bool, ratio: float = tolerance.ROUNDING_ERROR_RATIO) -> None:
    expected = expected_logits(twin)
    exact = load(folder, dtype="float32").logits(TOKENS)
    assert largest_error(exact, expected) < tolerance.F32_LOGITS  # the values to which torch dequantizes
    llm = load(folder)
    expanded = load(folder, weight_dtype="bf16")
    cost = rounding_cost(twin, expected)
    if kept:  # the weights are exact
        assert rms(llm.logits(TOKENS), expected) < ratio * cost
    for each in (llm, expanded):  # weights are rounded to bf16, too
        assert rms(each.logits(TOKENS), expected) < 2 * ratio * cost
    bytes_kept, bytes_expanded = (int(each.stats()["weight_bytes"]) for each in (llm, expanded))
    assert (bytes_kept < 0.85 * bytes_expanded) == kept
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = plan(str(folder), 1 << 30)["weight_bytes"]
    if kept:  # packed weights are padded to 128 inputs
        assert planned <= bytes_kept < 1.6 * planned


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_logits_equal_those_of_the_dequantized_weights(
    name: str, llama: Path, tmp_path: Path, record_support: RecordSupport
) -> None:
    layout = layouts.LAYOUTS[name]
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layout)
    check(tmp_path / "quantized", tmp_path / "twin", layout.kept)
    record_support(tmp_path / "quantized", name)


@pytest.mark.parametrize("name", ["fp8_blocks", "modelopt_nvfp4", "ct_w4a16"])
def test_latents_and_experts(name: str, tmp_path: Path, record_support: RecordSupport) -> None:
    source = make_source(tmp_path / "source", "DeepseekV3", **LATENTS)
    layouts.write(source, tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS[name])
    # kv_b_proj is expanded, and rounds its own x.
    check(tmp_path / "quantized", tmp_path / "twin", True, 2 * tolerance.LATENT_ROUNDING_RATIO)
    record_support(tmp_path / "quantized", name)


@pytest.mark.parametrize("only", ["q_proj", "up_proj"])
def test_weights_of_one_stack_may_be_stored_differently(only: str, llama: Path, tmp_path: Path) -> None:
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS["awq"], only)
    expected = expected_logits(tmp_path / "twin")
    exact = load(tmp_path / "quantized", dtype="float32").logits(TOKENS)
    assert largest_error(exact, expected) < tolerance.F32_LOGITS
    cost = rounding_cost(tmp_path / "twin", expected)
    assert rms(load(tmp_path / "quantized").logits(TOKENS), expected) < tolerance.ROUNDING_ERROR_RATIO * cost


def test_chunks_of_a_prompt_give_the_same_bits(llama: Path, tmp_path: Path) -> None:
    for name in ("fp8_blocks", "gptq_4_act_order", "nf4"):
        layouts.write(llama, tmp_path / name, tmp_path / "twin", layouts.LAYOUTS[name])
        whole, chunks = (load(tmp_path / name, max_num_batched_tokens=n).logits(TOKENS) for n in (128, 64))
        assert np.array_equal(whole, chunks), name


def test_kv_scales_of_a_quantized_checkpoint_are_used(llama: Path, tmp_path: Path) -> None:
    layout = layouts.LAYOUTS["modelopt_fp8"]
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layout)
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for layer in range(SIZES["num_hidden_layers"]):
        for side in "kv":
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = torch.tensor(0.03125 * (layer + 1))
    safetensors.torch.save_file(tensors, path)
    declared = layout.files["hf_quant_config.json"]["quantization"] | {"kv_cache_quant_algo": "FP8"}
    (tmp_path / "quantized" / "hf_quant_config.json").write_text(json.dumps({"quantization": declared}))
    llm = load(tmp_path / "quantized", kv_cache_dtype="auto")
    assert llm.stats()["kv_cache_dtype"] == "fp8_e4m3"
    assert rms(llm.logits(TOKENS), expected_logits(tmp_path / "twin")) < 0.2


# ---- what is wrong with a checkpoint is named

Tensors = dict[str, torch.Tensor]
MODULE = "model.layers.1.mlp.down_proj."


def drop(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[MODULE + part]

    return change


def put(part: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[MODULE + part] = edit(tensors[MODULE + part]).contiguous()

    return change


def fill(part: str, value: float) -> Callable[[Tensors], None]:
    return put(part, lambda tensor: torch.full_like(tensor, value))


def nan_code(tensors: Tensors) -> None:
    tensors[MODULE + "weight"].view(torch.uint8)[3, 5] = 0x7F


def add(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[MODULE + part] = torch.ones(4)

    return change


FAULTS: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "no scale": ("fp8_blocks", drop("weight_scale_inv"), r"down_proj.weight_scale' is missing"),
    "scales of another shape": (
        "fp8_blocks",
        put("weight_scale_inv", lambda scale: scale[:1]),
        r"has shape \[1, 3\]; expected .*\[2, 3\] for blocks of 128 x 128",
    ),
    "NaN scale": ("fp8_blocks", fill("weight_scale_inv", float("nan")), r"weight_scale_inv' has the value nan"),
    "zero scale": ("fp8_blocks", fill("weight_scale_inv", 0), r"has the value 0 at index 0; expected finite scales"),
    "NaN code": ("fp8_blocks", nan_code, r"down_proj.weight' has NaN in row 3"),
    "fp8 of another kind": (
        "fp8_blocks",
        put("weight", lambda weight: weight.float().to(torch.float8_e5m2)),
        r"is stored as F8_E5M2; quantized weights are read from F8_E4M3",
    ),
    "infinite group scale": ("awq", fill("scales", float("inf")), r"scales' has the value inf"),
    "no zero points": ("awq", drop("qzeros"), r"down_proj.qzeros' is missing"),
    "AWQ transposed": (
        "awq",
        put("qweight", lambda weight: weight.T),
        r"qweight' is I32 \[.*\]; expected I32 \[320, 32\]",
    ),
    "GPTQ groups": ("gptq_4", put("scales", lambda scales: scales[:-1]), r"scales' is F16 \[4, 256\]; expected F16\|"),
    "GPTQ words": ("gptq_4", put("qweight", lambda words: words[:-1]), r"expected I32 \[40, 256\]: 4 bits of 320"),
    "group index": ("gptq_4", fill("g_idx", 5), r"g_idx' has the group 5; there are 5 groups of 64"),
    "bias that is not zero": ("gptq_4", fill("bias", 1), r"down_proj.bias' would be ignored"),
    "declared shape": ("ct_w4a16", fill("weight_shape", 7), r"weight_shape' is not \[256, 320\]"),
    "packed words": ("ct_w4a16", put("weight_packed", lambda words: words[:, :-1]), r"expected I32 \[256, 40\]"),
    "scale of a channel": ("ct_int8", put("weight_scale", lambda scale: scale[:9]), r"has shape \[9, 1\]; expected"),
    "no tensor scale": ("modelopt_nvfp4", drop("weight_scale_2"), r"weight_scale_2' is missing"),
    "zero tensor scale": ("ct_nvfp4", fill("weight_global_scale", 0), r"weight_global_scale' has the value 0"),
    "scales of half the groups": (
        "modelopt_nvfp4",
        put("weight_scale", lambda scale: scale.view(torch.uint8)[:, ::2].contiguous().view(torch.float8_e4m3fn)),
        r"weight_scale' is F8_E4M3 \[256, 10\]; expected .*\[256, 20\]",
    ),
    "scales of activations": ("modelopt_nvfp4", add("pre_quant_scale"), r"pre_quant_scale' scales activations"),
    "NaN exponent": ("quark_mxfp4", fill("weight_scale", 255), r"weight_scale' is NaN at index 0"),
    "NaN exponent of 8 bits": ("ct_mxfp8", fill("weight_scale", 255), r"weight_scale' is NaN at index 0"),
    "groups of 8 bits": (
        "ct_mxfp8",
        put("weight_scale", lambda scale: scale[:, :-1]),
        r"weight_scale' is U8 \[256, 9\]; expected U8\|F8_E8M0 \[256, 10\]",
    ),
    "blocks": (
        "nf4",
        put("weight.absmax", lambda absmax: absmax[:-1]),
        r"weight.absmax' has 1279 values; expected 1280",
    ),
    "state": ("nf4", drop("weight.quant_state.bitsandbytes__nf4"), r"quant_state.bitsandbytes__fp4' is missing"),
    "a tensor that nothing reads": ("awq", add("smooth"), r"down_proj.smooth' would be ignored"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_on_one_line(fault: str, llama: Path, tmp_path: Path) -> None:
    name, change, message = FAULTS[fault]
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS[name])
    path = tmp_path / "quantized" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path / "quantized")
    assert "\n" not in str(error.value)


def test_undeclared_quantization_is_an_error(llama: Path, tmp_path: Path) -> None:
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS["ct_w4a16"])
    tiny_models.edit_config(tmp_path / "quantized", quantization_config=...)
    with pytest.raises(InputError, match=r"config\.json declares no method"):
        load(tmp_path / "quantized")


def test_an_unknown_method_is_an_error(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    tiny_models.edit_config(tmp_path / "model", quantization_config={"quant_method": "hqq"})
    with pytest.raises(
        InputError,
        match=r"config\.json: key 'quantization_config\.quant_method' is 'hqq'; expected one of fp8, .*awq, gptq",
    ):
        load(tmp_path / "model")


def test_a_group_size_that_does_not_divide_is_an_error(llama: Path, tmp_path: Path) -> None:
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS["awq"])
    tiny_models.edit_config(tmp_path / "quantized", **{"quantization_config.group_size": 96})
    with pytest.raises(InputError, match=r"256 inputs and 256 outputs; expected multiples of the group size \(96\)"):
        load(tmp_path / "quantized")


def test_packing_is_that_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (3, 4, 8):
        codes = torch.randint(0, 2**bits, (5, 77), generator=torch.Generator().manual_seed(bits))
        signed = (codes - 2 ** (bits - 1)).to(torch.int8)
        assert torch.equal(quantized_packing.pack_rows(codes, bits), helpers.pack_to_int32(signed, bits))


def test_an_engine_of_a_quantized_folder_reports_its_weights(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "plain")
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layouts.LAYOUTS["fp8_blocks"])
    plain, quantized = (int(load(tmp_path / name).stats()["weight_bytes"]) for name in ("plain", "quantized"))
    embeddings = 2 * 2 * tiny_models.VOCAB * SIZES["hidden_size"]
    assert (quantized - embeddings) / (plain - embeddings) < 0.65
