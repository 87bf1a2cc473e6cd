"""GPT-OSS's experts in MXFP4 against transformers: read exactly, kept, expanded, refused."""

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
from logits_oracle import TOKENS, edit_tensor, largest_error, logits, rms_error
from model_support import RecordSupport
from numpy.typing import NDArray
from transformers import PreTrainedModel

import kvanta
from kvanta.fleet.plan import plan

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
