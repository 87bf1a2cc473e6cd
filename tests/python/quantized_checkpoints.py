"""Checkpoints with linear layers quantized in the layouts of the hub's producers, and their dequantized twins."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from quantized_packing import (
    BNB_FP4,
    NF4,
    Quantized,
    Tensors,
    awq,
    bitsandbytes_4bit,
    bitsandbytes_int8,
    fp8_blocks,
    fp8_channel,
    fp8_tensor,
    gptq,
    int8_asymmetric,
    int8_channel,
    mxfp4,
    mxfp8,
    nvfp4,
    packed,
)


@dataclass(frozen=True)
class Layout:
    """A way to store a weight: what goes into quantization_config, and the tensors of a module by their last names."""

    config: dict[str, Any]
    quantize: Callable[[torch.Tensor], Quantized]
    files: dict[str, Any] = field(default_factory=dict)  # other JSON files
    kept: bool = True  # read without expansion


def compressed_tensors(format_name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def gptq_config(bits: int, group_size: int, **others: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": False, **others}


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.33"}}
LAYOUTS = {
    "fp8_blocks": Layout(FP8_BLOCKS, fp8_blocks("weight_scale_inv")),
    "auto_fp8": Layout(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, fp8_tensor
    ),
    "fbgemm_fp8": Layout(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8_channel,
    ),
    "ct_fp8_tensor": Layout(
        compressed_tensors("float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True), fp8_tensor
    ),
    "ct_fp8_channel": Layout(
        compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
        fp8_channel,
    ),
    "ct_fp8_blocks": Layout(
        compressed_tensors(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True
        ),
        fp8_blocks("weight_scale"),
    ),
    "modelopt_fp8": Layout(
        {},
        fp8_tensor,
        {"hf_quant_config.json": MODELOPT | {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}},
    ),
    "modelopt_fp8_blocks": Layout(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": ["lm_head"]},
        fp8_blocks("weight_scale", True),
    ),
    "quark_fp8": Layout(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}},
            "exclude": ["lm_head"],
            "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        },
        fp8_tensor,
    ),
    "quark_mxfp4": Layout(
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
        mxfp4("weight"),
    ),
    "ct_int8": Layout(compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channel),
    "ct_int8_asymmetric": Layout(
        compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        int8_asymmetric,
        kept=False,
    ),
    "ct_w8a16": Layout(
        compressed_tensors("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
        packed(8, None),
    ),
    "ct_w4a16": Layout(
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64), packed(4, 64)
    ),
    "ct_w4a16_asymmetric": Layout(
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
        packed(4, 32, with_zeros=True),
    ),
    "ct_w3a16": Layout(
        compressed_tensors("pack-quantized", num_bits=3, type="int", strategy="group", group_size=64), packed(3, 64)
    ),
    "ct_nvfp4": Layout(
        compressed_tensors("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        nvfp4(modelopt=False),
    ),
    "ct_mxfp4": Layout(
        compressed_tensors("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4("weight_packed"),
    ),
    "ct_mxfp8": Layout(
        compressed_tensors("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32), mxfp8
    ),
    "modelopt_mxfp8": Layout(
        {}, mxfp8, {"hf_quant_config.json": MODELOPT | {"quantization": {"quant_algo": "MXFP8", "group_size": 32}}}
    ),
    "modelopt_nvfp4": Layout(
        {},
        nvfp4(modelopt=True),
        {"hf_quant_config.json": MODELOPT | {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}},
    ),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(64)),
    "gptq_4": Layout(gptq_config(4, 64), gptq(4, 64)),
    "gptq_4_act_order": Layout(gptq_config(4, 64, desc_act=True), gptq(4, 64, act_order=True)),
    "gptq_4_ragged": Layout(gptq_config(4, 64), gptq(4, 64, act_order=True, ragged=True), kept=False),
    "gptq_v2": Layout(gptq_config(4, -1, checkpoint_format="gptq_v2"), gptq(4, None, v2=True)),
    "gptq_2": Layout(gptq_config(2, 64), gptq(2, 64)),
    "gptq_3": Layout(gptq_config(3, 64), gptq(3, 64)),
    "gptq_8": Layout(gptq_config(8, 64), gptq(8, 64), kept=False),
    "nf4": Layout(BNB4, bitsandbytes_4bit("nf4", NF4, False)),
    "nf4_nested": Layout(BNB4 | {"bnb_4bit_use_double_quant": True}, bitsandbytes_4bit("nf4", NF4, True)),
    "bnb_fp4": Layout(BNB4 | {"bnb_4bit_quant_type": "fp4"}, bitsandbytes_4bit("fp4", BNB_FP4, False), kept=False),
    "bnb_int8": Layout({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes_int8),
}


_FUSED_EXPERTS = re.compile(r"(.+\.(?:feed_forward|layers\.\d+\.mlp)\.experts)\.(gate_up|down)_proj")


_FURTHER_LINEAR = r"\.dense|dense_h_to_4h|dense_4h_to_h|\.fc[12]|\.c_fc|query_key_value|\.wqkv|\.wo|\.wq|\.wkv_[ab].*"


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Linear layers of the language model's layers, except for routers and small projections of recurrent layers and
    of indexers."""
    linear = (
        re.search(
            r"((?<!weights)_proj|_proj_qkvz?|_proj_z|\.w[123]|\.wq_b|\.wk|put_linear|"
            + _FURTHER_LINEAR
            + r")\.weight$",
            name,
        )
        is not None
    )
    return (
        (".layers." in name or name.startswith("layers.") or ".h." in name)
        and "vision" not in name
        and "audio" not in name
        and ".g_proj." not in name  # a row for each head
        and linear
        and tensor.dim() == 2
    )


def _has_inputs_first(name: str) -> bool:
    return ".feed_forward." in name


def _split_experts(name: str, fused: torch.Tensor) -> Tensors:
    """Experts of one tensor, [experts][in][out] of Llama 4 and else transposed, as the modules that are quantized."""
    module, kind = _FUSED_EXPERTS.fullmatch(name).groups()  # type: ignore[union-attr]
    fused = fused if _has_inputs_first(name) else fused.transpose(1, 2)
    parts = {"down": fused} if kind == "down" else dict(zip(("gate", "up"), fused.chunk(2, -1), strict=True))
    return {f"{module}.{i}.{p}_proj.weight": x[i].T.contiguous() for p, x in parts.items() for i in range(len(x))}


def _join_experts(name: str, modules: Tensors) -> torch.Tensor:
    module, kind = _FUSED_EXPERTS.fullmatch(name).groups()  # type: ignore[union-attr]
    parts = ["down"] if kind == "down" else ["gate", "up"]
    count = sum(each.startswith(f"{module}.") and each.endswith(f".{parts[0]}_proj.weight") for each in modules)
    experts = [torch.cat([modules[f"{module}.{i}.{part}_proj.weight"] for part in parts]).T for i in range(count)]
    joined = torch.stack(experts)
    return joined if _has_inputs_first(name) else joined.transpose(1, 2).contiguous()


def _quantized_stack(name: str, tensor: torch.Tensor, layout: Layout, only: str) -> tuple[Tensors, torch.Tensor] | None:
    """Parts of experts that have one tensor (Step 3.5), and their values; None for tensors that are no such stack, and
    for layouts with other parts than matrices."""
    if ".moe." not in name or tensor.dim() != 3 or only not in name:
        return None
    each, values = zip(*(layout.quantize(expert.float()) for expert in tensor), strict=True)
    if any(part.dim() != 2 for part in each[0].values()):
        return None
    module = name.removesuffix("weight")
    return {module + part: torch.stack([parts[part] for parts in each]) for part in each[0]}, torch.stack(values)


def write(source: Path, folder: Path, twin: Path, layout: Layout, only: str = "") -> None:
    """Writes `source` with quantized layers, those whose names contain `only`, and with the dequantized values."""
    stored = safetensors.torch.load_file(source / "model.safetensors")
    fused = [name for name in stored if _FUSED_EXPERTS.fullmatch(name)]
    tensors = {name: tensor for name, tensor in stored.items() if name not in fused}
    for name in fused:
        tensors |= _split_experts(name, stored[name])
    quantized: Tensors = {}
    dequantized: Tensors = {}
    for name, tensor in tensors.items():
        if stack := _quantized_stack(name, tensor, layout, only):
            stored_parts, dequantized[name] = stack
            quantized |= stored_parts
            continue
        if not is_quantized(name, tensor) or only not in name:
            quantized[name] = dequantized[name] = tensor
            continue
        parts, dequantized[name] = layout.quantize(tensor.float())
        module = name.removesuffix("weight")
        quantized |= {module + part: value.contiguous() for part, value in parts.items()}
    for name in fused:
        dequantized[name] = _join_experts(name, dequantized)
    dequantized = {name: tensor for name, tensor in dequantized.items() if name in stored}
    for target, contents in ((folder, quantized), (twin, dequantized)):
        shutil.copytree(source, target, dirs_exist_ok=True)
        safetensors.torch.save_file(contents, target / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if layout.config:
        config["quantization_config"] = layout.config
    (folder / "config.json").write_text(json.dumps(config))
    for name, text in layout.files.items():
        (folder / name).write_text(json.dumps(text))
