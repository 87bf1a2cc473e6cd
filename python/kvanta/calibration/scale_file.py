"""Kvanta's own scale files (docs/scales.md)."""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.calibration.calibrate import Calibration
from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.files.safetensors_writer import write_safetensors


def _numbers(values: NDArray[np.float32]) -> Any:
    """Nested lists of the shortest decimals that read back as the same float32."""
    if values.ndim == 0:
        return float(str(values.astype(np.float32)))
    return [_numbers(part) for part in values]


def scale_file(calibration: Calibration, info: _core.ModelInfo) -> dict[str, Any]:
    """The file's content."""
    layers: dict[str, Any] = {}
    for layer in range(info.layers):
        entry: dict[str, Any] = {}
        own = calibration.of_layer(layer)
        for key, scales in (("k_scale", own.k_scale), ("v_scale", own.v_scale)):
            entry[key] = _numbers(scales if calibration.granularity == "head" else scales[0])
        if own.k_mean is not None:
            entry["k_mean"] = _numbers(own.k_mean)
        if own.k_outliers is not None:
            entry["k_outliers"] = own.k_outliers.tolist()
        layers[str(layer)] = entry
    source = f"{calibration.method} of {calibration.tokens} tokens in windows of {calibration.window}"
    return {
        "kvanta_kv_scales": 1,
        "comment": f"kvanta calibrate: {source}",
        "model": {
            "architecture": info.architecture,
            "layers": info.layers,
            "kv_heads": info.kv_heads,
            "head_dim": info.head_dim,
            "hash": info.hash,
        },
        "granularity": calibration.granularity,
        "layers": layers,
    }


def check_scale_file_name(path: str | Path, has_matrices: bool) -> None:
    """Raises InputError unless the name's ending is that of the file's kind."""
    if has_matrices != (Path(path).suffix == ".safetensors"):
        raise InputError(
            f"{str(path)!r}: a scale file with the matrices of +query is FILE.safetensors"
            if has_matrices
            else f"{str(path)!r}: a scale file without the matrices of +query is JSON; choose another ending"
        )


def write_scale_file(path: str | Path, calibration: Calibration, info: _core.ModelInfo) -> None:
    """Writes the file, whole or not at all: JSON, or safetensors with the matrices of +query and the JSON as metadata.

    Raises InputError if a calibration with matrices has another name than *.safetensors, and ResourceError.
    """
    path = Path(path).expanduser()
    check_scale_file_name(path, calibration.query is not None)
    # A unique name: replicas that start together write the same file.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        text = json.dumps(scale_file(calibration, info))
        if calibration.query is None:
            partial.write_text(text + "\n", encoding="utf-8")
        else:
            tensors = {
                f"layers.{layer}.{name}": values
                for name, of_layers in calibration.query.tensors().items()
                for layer, values in enumerate(of_layers)
            }
            shapes = {name: values.shape for name, values in tensors.items()}
            write_safetensors(partial, shapes, tensors.items(), "F32", {"kvanta_kv_scales": text})
        partial.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise ResourceError(f"cannot write {str(path)!r}: {reason_of(error)}") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            partial.unlink(missing_ok=True)
