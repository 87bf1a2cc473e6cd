"""A tiny DeepSeek V4 with weights as DeepSeek publishes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import tiny_models
import torch

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def powers_of_two(weight: torch.Tensor, rows: int, columns: int, largest: float) -> torch.Tensor:
    """Scales of blocks, with which no weight exceeds `largest`."""
    blocks = weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    return torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / largest)))


def publish_weights(folder: Path, twin: Path) -> None:
    """FP8 in blocks of 128 x 128, and experts in FP4 in groups of 32, both with scales in powers of two, as DeepSeek
    publishes them; `twin` gets their values."""
    shutil.copytree(folder, twin)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    values = dict(tensors)
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        if ".experts." in name:
            scales = powers_of_two(weight, 1, 32, 6.0)
            spread = scales.repeat_interleave(32, 1)
            codes = ((weight / spread)[..., None] - FP4).abs().argmin(-1)
            values[name] = FP4[codes] * spread
            tensors[name] = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8).contiguous()
        elif ".shared_experts." in name or module.endswith(("wq_a", "wq_b", ".attn.wkv", "wo_a", "wo_b")):
            scales = powers_of_two(weight, 128, 128, 448.0)
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            values[name] = tensors[name].float() * spread
        else:
            continue
        tensors[f"{module}.scale"] = scales.to(torch.float8_e8m0fnu)
    for target, contents in ((folder, tensors), (twin, values)):
        safetensors.torch.save_file(contents, target / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    quantization = {**fp8, "activation_scheme": "dynamic"}
    tiny_models.edit_config(folder, expert_dtype="fp4", quantization_config=quantization)


def save_published(published: Path, twin: Path) -> None:
    """A model whose weights are codes, and one with their values. Rounding chooses no other entries or experts."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "head_dim": 128,
        "partial_rotary_factor": 0.125,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
    }
    sizes |= {"index_head_dim": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    sizes |= {"index_topk": 64, "n_routed_experts": 3}
    tiny_models.save(tiny_models.make_model("DeepseekV4", **sizes), published)
    publish_weights(published, twin)
