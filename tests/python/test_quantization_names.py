"""Quantized checkpoints whose configuration has other names, or whose scales come with unquantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints as layouts
import safetensors.torch
import tiny_models
import tolerance
import torch
from logits_oracle import largest_error
from test_quantized_checkpoints import SIZES, TOKENS, expected_logits, load


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.save(tiny_models.make_model("Llama", **SIZES), folder, torch.bfloat16)
    return folder


def configure(folder: Path, **quantization: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


AUTO_ROUND = {"bits": 4, "group_size": 64, "sym": False, "extra_config": {}}
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto-round": ("gptq_4", {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", **AUTO_ROUND}),
    "intel/auto-round": ("gptq_4", {"quant_method": "intel/auto-round", "backend": "auto_round:gptq", **AUTO_ROUND}),
    "auto-round as AWQ": ("awq", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", **AUTO_ROUND}),
    "gptq_marlin": ("gptq_4", layouts.gptq_config(4, 64, quant_method="gptq_marlin")),
    "awq_marlin": ("awq", {**layouts.LAYOUTS["awq"].config, "quant_method": "awq_marlin"}),
    "format": ("gptq_v2", layouts.gptq_config(4, -1, format="gptq_v2")),
    "dynamic": ("gptq_4", layouts.gptq_config(4, 32, dynamic={"+:.*": {"group_size": 64}})),
}


@pytest.mark.parametrize(("layout", "quantization"), NAMES.values(), ids=NAMES.keys())
def test_the_same_tensors_under_another_name(
    layout: str, quantization: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantized"
    layouts.write(llama, folder, tmp_path / "twin", layouts.LAYOUTS[layout])
    expected = load(folder).logits(TOKENS)
    configure(folder, **quantization)
    np.testing.assert_array_equal(load(folder).logits(TOKENS), expected)


@pytest.mark.parametrize("name", ["dense", "frozen"])
def test_weights_that_were_saved_uncompressed(name: str, llama: Path, tmp_path: Path) -> None:
    """llm-compressor with save_compressed=False: scales next to weights in bf16."""
    folder = tmp_path / "model"
    layouts.write(llama, folder, tmp_path / "twin", layouts.LAYOUTS["ct_int8"])
    tensors = safetensors.torch.load_file(llama / "model.safetensors")
    quantized = safetensors.torch.load_file(folder / "model.safetensors")
    scales = {key: value for key, value in quantized.items() if key.endswith("_scale")}
    assert scales
    safetensors.torch.save_file({**tensors, **scales}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    configure(folder, **{**config, "format": name, "quantization_status": "frozen"})
    np.testing.assert_array_equal(load(folder).logits(TOKENS), load(llama).logits(TOKENS))


def test_mxfp8_of_compressed_tensors(llama: Path, tmp_path: Path) -> None:
    """E4M3 codes in groups of 32, with a power of two as a byte for each."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = weight.reshape(weight.shape[0], -1, 32)
        exponents = torch.floor(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-30))) - 8
        codes = (groups / 2**exponents).to(torch.float8_e4m3fn)
        values = (codes.float() * 2**exponents).reshape(weight.shape)
        scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
        return {"weight": codes.reshape(weight.shape), "weight_scale": scales}, values

    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    config = layouts.compressed_tensors("mxfp8-quantized", **weights)
    layouts.write(llama, tmp_path / "quantized", tmp_path / "twin", layouts.Layout(config, quantize, kept=False))
    exact = load(tmp_path / "quantized", dtype="float32").logits(TOKENS)
    assert largest_error(exact, expected_logits(tmp_path / "twin")) < tolerance.F32_LOGITS
