"""Numbers of tokens and users that fit in a memory: true bytes, from the code that lays out the engine's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_config
from kvanta.engine.config import draft_config, engine_config
from kvanta.errors import InputError, ResourceError
from kvanta.params.checks import one_line, text
from kvanta.terminal.tables import human_bytes

_LEAST_MEMORY = 8 << 30
_SIZE = "the cache has what the weights leave of the memory that is planned"
_SCALES = "the sizes of a cache do not depend on scales"
# Options of the engine that would be ignored.
_MEANINGLESS: Mapping[str, str] = {
    "kv_cache_memory_bytes": _SIZE,
    "max_total_tokens": _SIZE,
    "num_gpu_blocks_override": _SIZE,
    "quantization_param_path": _SCALES,
    "calculate_kv_scales": _SCALES,
}


def default_memory(weight_bytes: int) -> int:
    """Bytes: 8 GiB, or the next power of two that leaves a fifth of it to the cache."""
    memory = _LEAST_MEMORY
    while memory * 4 < weight_bytes * 5:
        memory *= 2
    return memory


def plan(
    model: str,
    memory_bytes: int | None = None,
    formats: Sequence[str] | None = None,
    context: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of `kvanta plan`: what fits in `memory_bytes` (default: default_memory) in addition to the weights.

    `model`: as anywhere, or a config.json alone, or the name of an example config; weights are not needed. Per format:
    `tokens` that the cache holds, of one sequence; `sequences`, of `context` tokens each (default: the model's limit),
    and `sequence_bytes`, the most that one of them takes. Whole pages count, exact pages that a scheme keeps too, and
    pages that a sliding window frees do not. `formats`: default all that the model can take. `options`: the engine's.
    Raises InputError, or ResourceError if the weights alone do not fit.
    """
    folder = resolve_config(model)
    path = str(folder.path)
    options = {name: value for name, value in dict(options or {}).items() if name != "max_model_len"}
    for name, reason in _MEANINGLESS.items():
        if options.get(name):
            raise InputError(f"{name} has no meaning here, got {one_line(options[name])}: {reason}")
    dtype, weight_dtype = (text(name, options.get(name) or "auto") for name in ("dtype", "weight_dtype"))
    info = _core.read_model_info(path, dtype, weight_dtype)
    limit = int(info.max_position)
    context = limit if context is None else context
    if not 0 < context <= limit:
        raise InputError(f"context must be in 1..{limit}, the limit of {folder.name!r}, got {context}")
    memory = default_memory(info.weight_bytes) if memory_bytes is None else memory_bytes
    cache_bytes = memory - info.weight_bytes
    if cache_bytes <= 0:
        raise ResourceError(
            f"{human_bytes(memory)} of memory leave no room for a cache: {folder.name!r} has "
            f"{human_bytes(info.weight_bytes)} of weights"
        )

    def cache_plan(name: str, others: Mapping[str, Any]) -> _core.CachePlan:
        arguments = {**others, "kv_cache_dtype": name, "max_model_len": context}
        return _core.plan_cache_bytes(engine_config(path, arguments))

    config = engine_config(path, options)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) != 1:
            raise InputError(
                f"{name} is {size}: a plan is for one process; of N, each has about 1/N of the weights and of the "
                "cache's bytes"
            )
    if draft_config(config.speculative_config):
        raise InputError(
            "speculative_config names a draft model: a plan is for one model; plan the other one by itself"
        )
    page_size = config.page_size
    of_layers = ("kv_cache_dtype_layers", "kv_cache_dtype_skip_layers")
    reference = cache_plan("bf16", {name: value for name, value in options.items() if name not in of_layers})
    rows = []
    refusal: InputError | None = None
    for name in formats or _core.format_names():
        try:
            layout = cache_plan(name, options)
        except InputError as error:
            if formats:
                raise
            refusal = error
            continue  # this model's layers do not take this format
        if not formats and layout.kv_cache_dtype != name:
            continue  # another name of a format of latents
        exact_bytes = layout.exact_pages_per_sequence * layout.exact_page_bytes + layout.draft_exact_bytes
        free_bytes = max(0, cache_bytes - layout.draft_state_bytes)
        tokens = max(0, free_bytes - exact_bytes) // (layout.page_bytes + layout.draft_page_bytes) * page_size
        drafts = layout.draft_page_bytes * -(-context // page_size) + layout.draft_exact_bytes  # of MTP
        sequence_bytes = layout.sequence_bytes + drafts
        if any(group["visibility"] != "full" or group["level_page_bytes"] for group in layout.groups):
            tokens = free_bytes * context // sequence_bytes  # in sequences of `context` tokens
        rows.append(
            {
                "name": name,
                "bits_per_element": layout.bits_per_element,
                "bytes_per_token": layout.bytes_per_token,
                "floor_bytes_per_token": layout.floor_bytes_per_token or layout.bytes_per_token,
                "page_bytes": layout.page_bytes,
                "exact_bytes_per_sequence": exact_bytes,
                "sequence_bytes": sequence_bytes,
                "tokens": tokens,
                "sequences": free_bytes // sequence_bytes,
                "ratio_to_bf16": reference.bytes_per_token / layout.bytes_per_token,
            }
        )
    if refusal is not None and not rows:  # then it is not about single formats
        raise refusal
    return {
        "model": folder.name,
        "architecture": info.architecture,
        "parameters": info.parameters,
        "dtype": info.dtype,
        "weight_dtype": options.get("weight_dtype") or "auto",
        "memory_bytes": memory,
        "weight_bytes": info.weight_bytes,
        "cache_bytes": cache_bytes,
        "context": context,
        "page_size": page_size,
        "formats": rows,
    }
