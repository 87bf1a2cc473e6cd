"""A copy of a checkpoint with its KV scales, under the names that vLLM and compressed-tensors read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.calibration import modelopt
from kvanta.calibration.calibrate import Calibration
from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.files.safetensors_writer import read_tensor_names, write_safetensors
from kvanta.files.working_folder import working_folder
from kvanta.terminal.progress import progress_bar
from kvanta.text.tokenizer_files.files import read_json

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FIRST, _SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_SCALES = "model-kv-scales.safetensors"
_MODELOPT = "hf_quant_config.json"
_GGUF_INDEX = "model.gguf.index.json"
_OWN_LAYERS = {"FalconH1ForCausalLM", "NemotronHForCausalLM"}
_BLOCK = 1 << 24


def quantization_config(strategy: str) -> dict[str, Any]:
    """compressed-tensors' description: unchanged weights, KV cache in E4M3 with static scales."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }


def check_target(source: Path, folder: str | Path) -> Path:
    """The folder, if a copy of `source` with scales can be made there. Raises InputError."""
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{str(folder)!r} exists already and is not an empty folder")
    if (source / _GGUF_INDEX).is_file():
        raise InputError(
            f"{str(source)!r} has its weights in a GGUF file: calibrate the folder that `kvanta convert` makes of it, "
            "or write a scale file (--out)"
        )
    config = read_json(source / "config.json")
    for architecture in _OWN_LAYERS.intersection(config.get("architectures") or []):
        raise InputError(
            f"{str(source)!r} is a {architecture}, whose checkpoints number layers otherwise than the cache does: "
            "write a scale file (--out)"
        )
    if "quantization_config" in config:
        raise InputError(
            f"{str(source)!r} has a quantization_config already; calibrate the checkpoint it was made from"
        )
    return folder


def _weight_map(source: Path) -> dict[str, str]:
    """Tensor -> file, in the copy's names."""
    if (source / _SINGLE).is_file():
        return dict.fromkeys(read_tensor_names(source / _SINGLE), _FIRST)
    found = read_json(source / _INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise InputError(f"{str(source)!r} has neither {_SINGLE} nor a weight_map in {_INDEX}")
    return {str(name): str(file) for name, file in found.items()}


def _attention_modules(source: Path) -> dict[int, str]:
    """Names of the attention of layers that have keys and values of their own."""
    config = _core.EngineConfig()
    config.model, config.kv_cache_dtype = str(source), "bf16"
    prefix = _core.decoder_prefix(str(source))
    groups = _core.plan_cache_bytes(config).groups
    layers = sorted(layer for group in groups if group["visibility"] != "recurrent" for layer in group["layers"])
    return {layer: f"{prefix}layers.{layer}.self_attn" for layer in layers}


def _scale_tensors(calibration: Calibration, modules: Mapping[int, str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """[1] per tensor, [kv_heads, 1, 1] per head, as compressed-tensors has them."""
    for layer, module in modules.items():
        own = calibration.of_layer(layer)
        for side, values in (("k", own.k_scale), ("v", own.v_scale)):
            shaped = values[:, None, None] if calibration.granularity == "head" else values
            yield f"{module}.{side}_scale", shaped


def _query_tensors(calibration: Calibration, modules: Mapping[int, str]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Kvanta's own names: key means and matrices of +query."""
    if calibration.query is None:
        return
    for name, of_layers in ({"k_mean": calibration.query.means} | calibration.query.tensors()).items():
        for layer, module in modules.items():
            yield f"{module}.{name}", of_layers[layer]


def _copy_file(source: Path, target: Path, what: str) -> None:
    with source.open("rb") as reader, target.open("wb") as writer, progress_bar(source.stat().st_size, what) as bar:
        while block := reader.read(_BLOCK):
            bar.update(writer.write(block))


def _write_copy(source: Path, work: Path, calibration: Calibration, schemes: Sequence[str] | None) -> None:
    modules = _attention_modules(source)
    if schemes is None:
        tensors = dict(_scale_tensors(calibration, modules))
        declaration = quantization_config(calibration.strategy)
    else:
        algorithms = modelopt.layer_algorithms(schemes, _core.decoder_prefix(str(source)))
        algorithms = {module: name for module, name in algorithms.items() if module in modules.values()}
        tensors = modelopt.scale_tensors(calibration, algorithms)
        declared = modelopt.quantization(algorithms)
        declaration = {"quant_method": "modelopt", "config_groups": {}, "ignore": [], **declared}
        content = {"producer": {"name": "kvanta", "version": _core.version()}, "quantization": declared}
        (work / _MODELOPT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tensors |= dict(_query_tensors(calibration, modules))
    weight_map = _weight_map(source)
    single = (source / _SINGLE).is_file()
    scale_file = _SECOND if single else _SCALES
    taken = sorted(tensors.keys() & weight_map.keys())
    if taken:
        raise InputError(f"{str(source)!r} has KV scales already: tensor {taken[0]!r}")
    left_out = {"config.json", _INDEX, _MODELOPT}
    for file in sorted(source.iterdir()):
        if not file.is_file() or file.name in left_out or file.name.startswith("."):
            continue
        if file.suffix == ".safetensors" and file.name not in (_SINGLE, *weight_map.values()):
            continue  # the engine would not read it either
        target = _FIRST if single and file.name == _SINGLE else file.name
        _copy_file(file, work / target, f"copying {file.name}")
    write_safetensors(
        work / scale_file, {name: values.shape for name, values in tensors.items()}, tensors.items(), "F32"
    )
    weight_map |= dict.fromkeys(tensors, scale_file)
    size = sum((work / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (work / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    config = read_json(source / "config.json")
    config["quantization_config"] = declaration
    (work / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def save_checkpoint(
    source: str | Path, folder: str | Path, calibration: Calibration, schemes: Sequence[str] | None = None
) -> Path:
    """Copies the model folder `source` to the new folder `folder`, with the scales as tensors and in config.json.

    `schemes`: one for each layer, which the copy declares as ModelOpt does; by default, fp8 in all layers.
    The folder appears complete or not at all. Outlier channels, and key means without matrices of +query, have no such
    names and stay out. Raises InputError when `folder` has files, or `source` has scales already, and ResourceError
    when it cannot be written.
    """
    source = Path(source)
    folder = check_target(source, folder)
    with working_folder(folder) as work:
        try:
            _write_copy(source, work, calibration, schemes)
            work.chmod(0o755)
            work.rename(folder)
        except OSError as error:
            raise ResourceError(f"cannot write {str(folder)!r}: {reason_of(error)}") from None
    return folder
