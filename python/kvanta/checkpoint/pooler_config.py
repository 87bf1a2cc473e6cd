"""Default pooling of a model: vLLM's pooler_config, else the files of sentence-transformers in the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import InputError
from kvanta.files.json_file import read_json_file
from kvanta.params.checks import one_line
from kvanta.params.pooling_params import PoolingParams

_MODULES = "modules.json"
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
# Fields of vLLM's PoolerConfig that have no effect with these values or null.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "task": ("embed",),
    "tok_pooling_type": (),
    "enable_chunked_processing": (False,),
    "max_embed_len": (),
    "logit_mean": (),
    "logit_sigma": (),
    "logit_bias": (),
    "logit_scale": (),
    "step_tag_id": (),
    "returned_token_ids": (),
}
_FIELDS = {
    "pooling_type": "pooling_type",
    "seq_pooling_type": "pooling_type",
    "normalize": "normalize",
    "use_activation": "use_activation",
    "dimensions": "dimensions",
}


def read_pooler_config(given: Mapping[str, Any]) -> PoolingParams:
    """The parameters that `pooler_config` gives. Raises InputError."""
    fields: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _FIELDS and name not in _NEUTRAL:
            raise InputError(f"pooler_config has {one_line(name)}; known: {', '.join(_FIELDS)}")
        if value is None:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise InputError(f"pooler_config: {name} is not supported, got {one_line(value)}")
            continue
        if _FIELDS[name] in fields:
            raise InputError(f"pooler_config: {name} is given twice, under its other name")
        fields[_FIELDS[name]] = value
    try:
        return PoolingParams(**fields)
    except InputError as error:
        raise InputError(f"pooler_config: {error}") from None


def default_pooling(model: Path, given: PoolingParams) -> PoolingParams:
    """`given`, then what the model's folder says, then the last token's state, normalized. Raises InputError."""
    file = model / _MODULES
    stored: dict[str, Any] = {}
    if file.is_file():
        stored["normalize"] = False
        for module in read_json_file(file, list):
            kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, Mapping) else ""
            if kind == "Normalize":
                stored["normalize"] = True
            elif kind == "Pooling" and given.pooling_type is None:
                stored["pooling_type"] = _stored_type(model / str(module.get("path", "")) / "config.json")
    return given.with_defaults(PoolingParams(**{"pooling_type": "last", "normalize": True, **stored}))


def _stored_type(file: Path) -> str:
    config = read_json_file(file, dict)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]]
    known = ", ".join(_MODES)
    raise InputError(f"{file} requests {', '.join(modes) or 'no pooling'}; supported: {known}; give pooler_config")
