"""How many tokens and users fit in a memory: true bytes, from the code that lays out the engine's cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvanta import _core
from kvanta.engine_options import engine_config
from kvanta.errors import InputError, ResourceError
from kvanta.models import resolve_model


def plan(
    model: str,
    memory_bytes: int,
    formats: Sequence[str] | None = None,
    context: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The report of `kvanta plan`: what fits in `memory_bytes` beside the weights.

    Per format: `tokens`, of one sequence however long; `sequences`, of `context` tokens each (default: the model's
    limit). Whole pages count, and the exact pages that a scheme keeps. `formats`: default all that the model can take.
    Raises ResourceError if the weights alone do not fit.
    """
    folder = resolve_model(model)
    options = dict(options or {})
    dtype = options.get("dtype") or "auto"
    info = _core.read_model_info(str(folder.path), dtype)
    limit = int(info.max_position)
    context = limit if context is None else context
    if not 0 < context <= limit:
        raise InputError(f"context is {context}, not in 1..{limit}, which is what {folder.name!r} allows")
    cache_bytes = memory_bytes - info.weight_bytes
    if cache_bytes <= 0:
        raise ResourceError(
            f"{memory_bytes} bytes of memory leave no room for a cache: {folder.name!r} has {info.weight_bytes} bytes "
            "of weights"
        )

    def cache_plan(name: str) -> _core.CachePlan:
        return _core.plan_cache_bytes(engine_config(str(folder.path), {**options, "kv_cache_dtype": name}))

    page_size = engine_config(str(folder.path), options).page_size
    reference = cache_plan("bf16")
    rows = []
    for name in formats or _core.format_names():
        try:
            layout = cache_plan(name)
        except InputError:
            if formats:
                raise
            continue  # this model's heads do not take this format
        exact_bytes = layout.exact_pages_per_sequence * layout.exact_page_bytes
        pages = max(0, cache_bytes - exact_bytes) // layout.page_bytes
        one_sequence = -(-context // page_size) * layout.page_bytes + exact_bytes
        rows.append(
            {
                "name": name,
                "bits_per_element": layout.bits_per_element,
                "bytes_per_token": layout.bytes_per_token,
                "tokens": pages * page_size,
                "sequences": cache_bytes // one_sequence,
                "ratio_to_bf16": reference.bytes_per_token / layout.bytes_per_token,
            }
        )
    return {
        "model": folder.name,
        "memory_bytes": memory_bytes,
        "weight_bytes": info.weight_bytes,
        "cache_bytes": cache_bytes,
        "context": context,
        "page_size": page_size,
        "formats": rows,
    }
