"""The C++ EngineConfig of a model folder, from engine options."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.errors import InputError
from kvanta.options.ages import with_ages
from kvanta.options.engine import OPTIONS, EngineOptions
from kvanta.options.scheme_file import is_scheme_file, read_scheme_file
from kvanta.params.checks import one_line

# Sizes of the cache, of which one may be given; the C++ EngineConfig takes bytes.
_CACHE_SIZES = ("kv_cache_memory_bytes", "max_total_tokens", "num_gpu_blocks_override")
# Options for single keys of speculative_config.
_SPECULATIVE_KEYS = {
    "speculative_algorithm": "method",
    "speculative_draft_model_path": "model",
    "speculative_draft_kv_cache_dtype": "kv_cache_dtype",
    "speculative_num_draft_tokens": "num_speculative_tokens",
}


def engine_config(folder: str, arguments: Mapping[str, Any]) -> _core.EngineConfig:
    """The C++ configuration for a model folder; options that are absent or None keep their defaults."""
    config = _core.EngineConfig()
    _set_field(config, "model", "model", folder)
    values = EngineOptions.read(_without_scheme_file(folder, with_ages(arguments)))
    _merge_speculative_keys(values)
    values.speculative_config = _with_draft_folder(values.speculative_config)
    if values.max_step_ms == "auto":
        values.max_step_ms = None
    for each in OPTIONS:
        if each.name not in (*_CACHE_SIZES[1:], *_SPECULATIVE_KEYS, "kv_cache_ages", "kv_cache_floor"):
            _set_field(config, each.config_field or each.name, each.name, getattr(values, each.name))
    _set_cache_size(config, {name: size for name in _CACHE_SIZES if (size := getattr(values, name))})
    return config


def _merge_speculative_keys(values: EngineOptions) -> None:
    keys = {key: value for name, key in _SPECULATIVE_KEYS.items() if (value := getattr(values, name))}
    if not keys:
        return
    if values.speculative_config:
        names = " and ".join(name for name in _SPECULATIVE_KEYS if getattr(values, name))
        raise InputError(f"{names} and speculative_config are given: give the keys of speculative_config alone")
    if "method" not in keys and "model" not in keys:
        name = next(name for name in _SPECULATIVE_KEYS if getattr(values, name))
        raise InputError(f"{name} is {getattr(values, name)}, and speculative_algorithm is missing")
    values.speculative_config = json.dumps(keys)


def _with_draft_folder(speculative_config: Any) -> str:
    """The JSON with the folder of the draft model, if there is one. Other mistakes are the C++ library's to name."""
    config = draft_config(speculative_config)
    if not config:
        return str(speculative_config or "")
    return json.dumps({**config, "model": str(resolve_model(config["model"]).path)})


def draft_config(speculative_config: Any) -> dict[str, Any]:
    """The keys of a speculative_config with a draft model; empty for another."""
    try:
        config = json.loads(speculative_config or "{}")
    except ValueError:
        return {}
    if not isinstance(config, dict) or config.get("method", "draft_model") != "draft_model":
        return {}
    return config if isinstance(config.get("model"), str) and config["model"] not in ("", "ngram") else {}


def _set_cache_size(config: _core.EngineConfig, sizes: Mapping[str, int]) -> None:
    """Bytes for the requested pages, and for the exact pages of max_num_seqs sequences in addition."""
    if len(sizes) > 1:
        given = " and ".join(f"{name} ({size})" for name, size in sizes.items())
        raise InputError(f"{given} are sizes of the same cache: give one of them")
    for name, size in sizes.items():
        if name == "kv_cache_memory_bytes":
            continue
        if size < 0:
            raise InputError(f"{name} must be a positive integer, got {size}")
        pages = size if name == "num_gpu_blocks_override" else math.ceil(size / config.page_size)
        tokens = pages * config.page_size
        if config.max_model_len > tokens:
            raise InputError(
                f"{name} is {size}: a cache of {tokens:,} tokens does not hold one sequence of max_model_len "
                f"({config.max_model_len:,} tokens)"
            )
        layout = _core.plan_cache_bytes(config)
        if any(group["level_page_bytes"] for group in layout.groups):
            raise InputError(
                f"{name} is {size}: with kv_cache_ages or kv_cache_floor the bytes of a token change; give "
                "kv_cache_memory_bytes"
            )
        exact = layout.exact_pages_per_sequence * layout.exact_page_bytes + layout.draft_exact_bytes
        cache_bytes = pages * (layout.page_bytes + layout.draft_page_bytes) + exact * config.max_num_seqs
        _set_field(config, "kv_cache_memory_bytes", name, cache_bytes)
        _shorten(config, tokens)


def _shorten(config: _core.EngineConfig, tokens: int) -> None:
    """Sets a max_model_len that was not given to a cache's size, if that is less than the model's limit."""
    if config.max_model_len > 0 or tokens >= _core.read_model_info(config.model).max_position:
        return
    config.max_model_len = tokens
    if _core.plan_cache_bytes(config).sequence_bytes > config.kv_cache_memory_bytes:  # the engine finds what it holds
        config.max_model_len = 0


def shortened(config: _core.EngineConfig, arguments: Mapping[str, Any]) -> str:
    """A warning if a size of the cache decided on max_model_len, in the size's own unit; else empty."""
    name = next((each for each in _CACHE_SIZES[1:] if arguments.get(each)), None)
    if name is None or arguments.get("max_model_len") or config.max_model_len == 0:
        return ""
    return f"max_model_len is {config.max_model_len}: {name} = {arguments[name]} holds no longer sequence"


def _without_scheme_file(folder: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with a scheme file replaced by its schemes."""
    file = arguments.get("kv_cache_dtype")
    if not is_scheme_file(file):
        return arguments
    if arguments.get("kv_cache_dtype_layers"):
        raise InputError(f"the scheme file {file!r} names every layer; kv_cache_dtype_layers cannot be given with it")
    layers = _core.read_model_info(folder, arguments.get("dtype") or "auto").layers
    return {**arguments, "kv_cache_dtype": "bf16", "kv_cache_dtype_layers": read_scheme_file(str(file), layers)}


def _set_field(config: _core.EngineConfig, field: str, name: str, value: Any) -> None:
    try:
        setattr(config, field, value)
    except (TypeError, ValueError, OverflowError):  # from the bindings: a number too large, a text that is not UTF-8
        reason = "valid UTF-8" if isinstance(value, str) else "in range"
        raise InputError(f"{name} must be {reason}, got {one_line(value)}") from None
