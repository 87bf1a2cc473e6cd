"""Memory of a model before it is loaded: its weights, and the cache that its options ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvanta.checkpoint.resolve import resolve_config
from kvanta.engine.config import engine_config
from kvanta.errors import InputError, KvantaError
from kvanta.fleet.plan import plan
from kvanta.options.ages import with_ages
from kvanta.options.engine import EngineOptions, by_name
from kvanta.terminal.tables import human_bytes

_CACHE = "kv_cache_memory_bytes"
_SIZES = (_CACHE, "max_total_tokens", "num_gpu_blocks_override")
_UNPLANNED = (
    *_SIZES,
    "quantization_param_path",
    "calculate_kv_scales",
    "max_model_len",
    "kv_cache_dtype",
    "kv_cache_ages",
    "kv_cache_floor",
)
_ALL = 2**60
_SHARE = 0.4
"""Part of the budget that a cache takes at most if neither its size nor the model's memory is given; the engine's own
share of the free memory."""


class ModelMemory(NamedTuple):
    """Bytes."""

    total: int
    cache: int | None
    """Size of the cache that the process must be given; None: its options say it."""


def model_memory(path: str, options: Mapping[str, Any], given: int | None, budget: int) -> ModelMemory:
    """`given`: weights and cache together, as the file declares them. Raises InputError or ResourceError."""
    engine = {name: options[name] for name in EngineOptions.__dataclass_fields__ if name in options}
    sizes = {name: by_name()[name].read(engine[name]) for name in _SIZES if engine.get(name)}
    if given is not None and sizes:
        return ModelMemory(given, None)
    folder = resolve_config(path).path
    try:
        report = _plan(path, engine)
    except KvantaError as error:
        hint = "memory" if sizes else f"memory and {_CACHE}"
        raise type(error)(f"its memory cannot be found ({error}); give {hint} in the file of --models") from None
    weights, row = int(report["weight_bytes"]), report["formats"][0]
    if given is not None:
        if given <= weights:
            raise InputError(f"memory is {human_bytes(given)}, and its weights alone have {human_bytes(weights)}")
        return ModelMemory(given, given - weights)
    if sizes:
        name, size = next(iter(sizes.items()))
        pages = {_CACHE: 0, "num_gpu_blocks_override": size, "max_total_tokens": -(-size // report["page_size"])}[name]
        return ModelMemory(weights + (size if name == _CACHE else pages * int(row["page_bytes"])), None)
    config = engine_config(str(folder), engine)
    cache = min(int(row["sequence_bytes"]) * int(config.max_num_seqs), int(budget * _SHARE))
    return ModelMemory(weights + cache, cache)


def _plan(path: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    longest = engine.get("max_model_len")
    context = None if longest is None else by_name()["max_model_len"].read(longest)
    others = {name: value for name, value in engine.items() if name not in _UNPLANNED}
    return plan(path, _ALL, [str(with_ages(engine).get("kv_cache_dtype") or "auto")], context or None, others)
