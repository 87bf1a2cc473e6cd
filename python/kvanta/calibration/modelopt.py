"""A cache scheme for each layer as NVIDIA ModelOpt declares it in a checkpoint, with its names of scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.calibration.calibrate import Calibration
from kvanta.errors import InputError

_ALGORITHMS = {"fp8_e4m3": "FP8", "nvfp4": "NVFP4", "k=fp8_e4m3,v=nvfp4": "FP8_K_NVFP4_V"}
_UNQUANTIZED = ("bf16", "fp16", "fp32")
_NVFP4_LARGEST = 6 * 448
"""A value of NVFP4 in units of its tensor's scale: the largest code times the largest scale of a block."""


def layer_algorithms(schemes: Sequence[str], prefix: str = "model.") -> dict[str, str]:
    """Algorithms by the layers' attention modules; layers that are not quantized have none. Raises InputError.

    `prefix`: what the names of the decoder's weights begin with.
    """
    algorithms = {}
    for layer, text in enumerate(schemes):
        scheme = str(_core.KvScheme.parse(text))
        if scheme in _UNQUANTIZED:
            continue
        if scheme not in _ALGORITHMS:
            known = ", ".join([*_ALGORITHMS, *_UNQUANTIZED])
            raise InputError(f"layer {layer}: ModelOpt has no algorithm for the scheme {text!r}; there are: {known}")
        algorithms[f"{prefix}layers.{layer}.self_attn"] = _ALGORITHMS[scheme]
    if not algorithms:
        raise InputError("no layer's scheme is quantized: there is nothing to declare in a checkpoint")
    return algorithms


def quantization(algorithms: Mapping[str, str]) -> dict[str, Any]:
    """ModelOpt's declaration: unchanged weights, and the algorithm of each layer's cache."""
    kinds = set(algorithms.values())
    return {
        "quant_algo": None,
        "kv_cache_quant_algo": kinds.pop() if len(kinds) == 1 else "MIXED_PRECISION",
        "kv_cache_quantized_layers": {module: {"quant_algo": name} for module, name in algorithms.items()},
        "kv_cache_schema_version": 1,
    }


def scale_tensors(calibration: Calibration, algorithms: Mapping[str, str]) -> dict[str, NDArray[np.float32]]:
    """Scales [] of the quantized layers, by name. Raises InputError for scales per head."""
    if calibration.granularity != "tensor":
        raise InputError(
            "ModelOpt's checkpoints have one scale for a layer's K and one for its V: granularity 'tensor'"
        )
    if calibration.statistics is None:
        raise InputError("ModelOpt's scales need statistics: calibrate()")
    amax = calibration.statistics.amax.max(axis=(2, 3))
    tensors = {}
    for module, algorithm in algorithms.items():
        layer = int(module.split(".")[-2])
        sides = (("k", calibration.k_scale), ("v", calibration.v_scale))
        for index, (side, scales) in enumerate(sides):
            is_nvfp4 = algorithm == "NVFP4" or (algorithm == "FP8_K_NVFP4_V" and side == "v")
            scale = amax[layer, index] / _NVFP4_LARGEST if is_nvfp4 else scales[layer, 0]
            tensors[f"{module}.{side}_proj.{side}_scale"] = np.maximum(np.float32(scale), np.finfo(np.float32).tiny)
    return {name: np.asarray(scale, dtype=np.float32) for name, scale in tensors.items()}
