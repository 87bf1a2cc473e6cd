"""Matrices of +query for a model that has none: calibrated once on the included texts and kept in $KVANTA_HOME."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.calibration.calibrate import calibrate_query
from kvanta.calibration.default_text import TEXT, TOKENS, mix_tokens
from kvanta.calibration.scale_file import write_scale_file
from kvanta.engine.cache_reader import CacheReader
from kvanta.engine.loaded_model import LoadedModel
from kvanta.errors import InputError
from kvanta.files.home_folder import kvanta_home

_log = logging.getLogger("kvanta")
WINDOW = 2048
_METHOD = "all positions"
"""Part of the files' names: files of another method are made again (docs/adr/0061)."""
# Options that change the keys: of the calibration they are those of the engine.
_KEPT_OPTIONS = ("dtype", "weight_dtype", "threads", "device", "isa")


def _file_name(fingerprint: str, config: _core.EngineConfig, eigen_channels: bool) -> str:
    """Name made of all that the matrices depend on, the computing unit included."""
    unit = "cuda" if config.device == "cuda" else f"cpu-{_core.selected_isa(config.isa)}"
    what = (
        fingerprint,
        hashlib.sha256((Path(config.model) / "config.json").read_bytes()).hexdigest(),
        unit,
        config.dtype,
        config.weight_dtype,
        hashlib.sha256(TEXT.read_bytes()).hexdigest(),
        str(TOKENS),
        _METHOD,
        "eigen" if eigen_channels else "",
        _core.version(),
    )
    return f"{fingerprint}-{unit}-{hashlib.sha256('|'.join(what).encode()).hexdigest()[:12]}.safetensors"


def add_query_matrices(config: _core.EngineConfig, name: str, arguments: Any, allowed: bool) -> None:
    """Sets quantization_param_path to a file for this model if its cache has +query and lacks the matrices.

    `name`: of the model, for messages. `arguments`: the engine's options as the caller gave them. `allowed`: False
    raises InputError where a calibration would be needed.
    """
    missing = _core.missing_query_matrices(config)
    if not missing.fingerprint:
        return
    folder = kvanta_home() / "query"
    file = folder / _file_name(missing.fingerprint, config, missing.eigen_channels)
    with_all = folder / _file_name(missing.fingerprint, config, True)
    if with_all.is_file():
        file = with_all
    if not file.is_file():
        if not allowed:
            raise InputError(
                f"kv_cache_dtype {config.kv_cache_dtype!r}: {name} has no matrices for +query; make them by `kvanta "
                "calibrate --query --out FILE.safetensors` and give --quantization-param-path FILE.safetensors, or let "
                "them be made when the model is loaded (without --no-auto-calibrate)"
            )
        _calibrate(config.model, name, arguments, file, missing.eigen_channels)
    config.quantization_param_path = str(file)


def _calibrate(folder: str, name: str, arguments: Any, file: Path, eigen_channels: bool) -> None:
    _log.warning(
        "%s: calibrating +query on %s tokens of the included texts, once; this takes about as long as a prompt of that "
        "length, Ctrl-C ends it, and the result is kept in %s",
        name,
        f"{TOKENS:,}",
        file,
    )
    longest = min(WINDOW, int(_core.read_model_info(folder).max_position))
    kept = {key: value for key, value in arguments.items() if key in _KEPT_OPTIONS}
    loaded = LoadedModel(folder, {"kv_cache_dtype": "bf16", "max_model_len": longest, "max_num_seqs": 1, **kept})
    found = calibrate_query(CacheReader(loaded.engine), mix_tokens(loaded.tokenizer), longest, eigen_channels)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_scale_file(file, found, loaded.engine.info)
