"""The shape of a model as config.json gives it, with the key of each fact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.checkpoint.fact import ModelFacts
from kvanta.errors import KvantaError
from kvanta.files.json_file import text_config


def key_of(config: Mapping[str, Any], *names: str) -> str:
    """The place of the first of these keys in config.json, that of the text model included."""
    for prefix, part in (("", config), ("text_config.", text_config(config))):
        for name in names:
            if part.get(name) is not None:
                return f"config.json {prefix}{name}"
    return f"the class's default, no {names[0]} in config.json"


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """The value of a key of config.json, or of the text model in it."""
    return config.get(name, text_config(config).get(name))


def add_shape(result: ModelFacts, folder: Path, config: Mapping[str, Any]) -> None:
    """Architecture, size, context, dtype, windows, positions and cache. Raises InputError."""
    result.info = info = result.info or _core.read_model_info(str(folder))
    cache = _cache(folder)
    result.add("architecture", info.architecture, key_of(config, "architectures"))
    result.add("size", f"{info.parameters / 1e6:,.1f} M parameters; {info.layers} layers of {info.hidden}")
    result.add("attention", _attention(info, cache))
    if not info.has_lm_head:
        result.add("output matrix", "none: texts are embedded, and none is generated", "no lm_head in the weights")
    place = key_of(config, "max_position_embeddings", "n_positions")
    if place.startswith("config.json") and info.max_position != value_of(config, "max_position_embeddings"):
        place += ", stretched by rope"
    result.add("context", f"{info.max_position:,} tokens", place)
    dtype = key_of(config, "dtype", "torch_dtype")
    result.add("dtype", info.dtype, dtype if dtype.startswith("config.json") else "the weights")
    _add_windows(result, config, cache)
    _add_rope(result, config)
    declared = info.declared_kv_cache
    named = (folder / "hf_quant_config.json").is_file()
    place = "hf_quant_config.json" if named else key_of(config, "quantization_config", "compression_config")
    if info.declared_kv_cache_error:
        declared = f"not known ({info.declared_kv_cache_error}): --kv-cache-dtype must choose one"
    result.default_cache = cache.kv_cache_dtype
    default = f"{cache.kv_cache_dtype}, unless --kv-cache-dtype says otherwise"
    result.add("KV cache", declared or default, place if declared else "no file")


def _cache(folder: Path) -> _core.CachePlan:
    """The cache without options; in bf16 where the files declare one that is not known."""
    config = _core.EngineConfig()
    config.model, config.kv_cache_dtype = str(folder), "auto"
    try:
        return _core.plan_cache_bytes(config)
    except KvantaError:
        config.kv_cache_dtype = "bf16"
        return _core.plan_cache_bytes(config)


def _layers(cache: _core.CachePlan, kind: str) -> list[int]:
    """Layers whose caches are of a kind."""
    return [layer for group in cache.groups if group["visibility"].startswith(kind) for layer in group["layers"]]


def _attention(info: _core.ModelInfo, cache: _core.CachePlan) -> str:
    recurrent = len(_layers(cache, "recurrent"))
    cached = set(_layers(cache, "")) - set(_layers(cache, "recurrent"))
    kinds = Counter(info.layer_heads[layer] for layer in sorted(cached))
    parts = []
    for (kv_heads, size), count in kinds.items():
        heads = f"latents of {size} + {info.rope_dim} (MLA)" if info.rope_dim else f"{kv_heads} KV heads of {size}"
        parts.append(heads if count == info.layers else f"{heads} in {count} of {info.layers} layers")
    shared = info.layers - len(cached) - recurrent
    parts += [f"a recurrent state in {recurrent}"] if recurrent else []
    parts += [f"the keys and values of others in {shared}"] if shared else []
    return ", ".join(parts)


def _add_windows(result: ModelFacts, config: Mapping[str, Any], cache: _core.CachePlan) -> None:
    assert result.info is not None
    for group in cache.groups:
        kind, _, length = group["visibility"].partition("=")
        if length and int(length) < result.info.max_position:  # a longer one hides nothing
            name = "sliding_window" if kind == "sliding_window" else "attention_chunk_size"
            about = f"{int(length):,} tokens in {len(group['layers'])} of {result.info.layers} layers"
            result.add("window" if kind == "sliding_window" else "chunks", about, key_of(config, name))


def _add_rope(result: ModelFacts, config: Mapping[str, Any]) -> None:
    if value_of(config, "position_embedding_type") == "nope":
        result.add("rope", "none", key_of(config, "position_embedding_type"))
        return
    names = ("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq")
    base, scaling, parameters, local = (value_of(config, name) for name in names)
    kinds = scaling or parameters
    kinds = kinds if isinstance(kinds, Mapping) else {}
    if kinds and all(isinstance(each, Mapping) for each in kinds.values()):  # by the kind of a layer's attention
        about = "; ".join(f"{name}: {_rope(None, each)}" for name, each in kinds.items())
    else:
        about = _rope(base, kinds)
        about += f"; base {local:,.10g} in layers with a window" if isinstance(local, int | float) else ""
    skips = value_of(config, "no_rope_layers")
    if isinstance(skips, list) and (count := sum(each == 0 for each in skips)):
        about += f"; none in {count} of {len(skips)} layers"
    keys = [key for key in (key_of(config, name) for name in names) if key.startswith("config.json")]
    if about:
        result.add("rope", about, ", ".join([keys[0], *(key.rpartition(".")[2].split()[-1] for key in keys[1:])]))


def _rope(base: Any, scaling: Mapping[str, Any]) -> str:
    base = scaling.get("rope_theta") if base is None else base
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    parts = [f"base {base:,.10g}"] if isinstance(base, int | float) else []
    if kind not in (None, "default"):
        parts.append(f"{kind} x {factor:.4g}" if isinstance(factor, int | float) else str(kind))
    return ", ".join(parts)
