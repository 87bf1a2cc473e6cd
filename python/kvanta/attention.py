"""Attention on the caller's arrays, through a really quantized cache: for tests and researchers.

Shapes: q [query_tokens, heads, head_dim]; k and v [tokens, kv_heads, head_dim]; the queries stand at the last
`query_tokens` positions, and each sees the keys up to its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvanta import _core
from kvanta.params.arrays import channel_lists, float_array
from kvanta.params.checks import each_of, real_number, text, whole_number


def backends() -> list[str]:
    """Backends that this machine runs, best first; "reference" computes in double precision."""
    return _core.backend_names()


def run(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scheme: str = "bf16",
    backend: str = "auto",
    page_size: int = 64,
    threads: int = 1,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: int = 0,
    k_scale: Sequence[float] | None = None,
    v_scale: Sequence[float] | None = None,
    k_mean: ArrayLike | None = None,
    k_query: ArrayLike | None = None,
    k_eigen: ArrayLike | None = None,
    k_outliers: ArrayLike | None = None,
) -> NDArray[np.float32]:
    """float32 [query_tokens, heads, head_dim]. Raises InputError for shapes, names or scales that do not fit.

    `softmax_scale`: default 1 / sqrt(head_dim). `k_scale`, `v_scale` [kv_heads]: of formats with static scales alone.
    `k_mean` [kv_heads, head_dim]: of schemes with +mean or +query. `k_query` [kv_heads, head_dim, head_dim]: the
    matrices of +query, and in klt3 and klt2 (also _g64) instead `k_eigen` [kv_heads, head_dim + 1, head_dim], as scale
    files and calibrate(..., query=True).query have them for a layer (docs/scales.md). `k_outliers` [kv_heads, N]:
    channels, of schemes with +outliers=N.
    """
    queries = float_array("q", q, ("query_tokens", "heads", "head_dim"))
    keys = float_array("k", k, ("tokens", "kv_heads", "head_dim"))
    heads, size = keys.shape[1:]
    text("scheme", scheme)
    text("backend", backend)

    def of_heads(name: str, values: ArrayLike | None, *axes: int) -> NDArray[np.float32] | None:
        return None if values is None else float_array(name, values, (heads, *axes))

    out, _, _ = _core.run_array_attention(
        queries,
        keys,
        float_array("v", v, ("tokens", "kv_heads", "head_dim")),
        scheme=scheme,
        backend=backend,
        query_start=len(keys) - len(queries),
        **_checked(page_size=page_size, threads=threads),
        # 0 is the library's default.
        softmax_scale=0.0
        if softmax_scale is None
        else real_number("softmax_scale", softmax_scale, 0.0, math.inf, open_below=True),
        softcap=real_number("softcap", softcap, 0.0, math.inf),
        sliding_window=whole_number("sliding_window", sliding_window, 0, 2**31 - 1),
        k_scale=of_heads("k_scale", k_scale),
        v_scale=of_heads("v_scale", v_scale),
        k_mean=of_heads("k_mean", k_mean, size),
        k_query=of_heads("k_query", k_query, size, size),
        k_eigen=of_heads("k_eigen", k_eigen, size + 1, size),
        k_outliers=[] if k_outliers is None else channel_lists("k_outliers", k_outliers, (heads, "N")),
    )
    return out


def reference(q: ArrayLike, k: ArrayLike, v: ArrayLike, **options: Any) -> NDArray[np.float32]:
    """Like run, in double precision on the same bytes: the oracle of every backend."""
    return run(q, k, v, **{**options, "backend": "reference"})


def read_limit_gb_s(threads: int, isa: str = "auto") -> float:
    """GB/s that this machine reads from memory with this number of threads, measured now: the limit of every decode."""
    whole_number("threads", threads, 1, 2**31 - 1)
    text("isa", isa)
    return _core.read_limit_gb_s(threads, isa)


def bench(
    *,
    formats: Sequence[str],
    isa: str = "auto",
    threads: Sequence[int] = (1,),
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 64,
    layers: int = 1,
    batch: int = 1,
    context: int = 32768,
    query_tokens: int = 1,
    seconds: float = 0.5,
    measured: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """The rows of one shape of `kvanta bench attention`: each result is verified against the reference, then timed in
    turns with a bf16 cache, a pass over memory and the peaks of the kernels' dots. Times are medians in ns.

    `share_of_limit`: the larger of `memory_ns` (the stored bytes at the rate that the machine reads at) and `dot_ns`
    (the multiply-adds at their peak) / `ns_median`. `in_cache_ns`: the same run where all pages are one, which the
    CPU's caches keep: what is left where memory takes no time. A run is one layer's; `layers` sets how many a page
    holds, one after another, as a model's pages do. `measured` is called after each row.
    """
    shape = _checked(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    work = _checked(layers=layers, batch=batch, context=context, query_tokens=query_tokens)
    counts = [
        whole_number("an entry of threads", count, 1, 2**31 - 1)
        for count in each_of("threads", threads, "numbers of threads")
    ]
    text("isa", isa)
    real_number("seconds", seconds, 0.0, 3600.0)
    return _core.run_attention_bench(
        formats=_texts(formats), isa=isa, threads=counts, **shape, **work, seconds=seconds, measured=measured
    )


def bench_gpu(
    *,
    formats: Sequence[str],
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 64,
    batch: int = 1,
    context: int = 32768,
    query_tokens: int = 1,
    seconds: float = 0.5,
    measured: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """The rows of one shape of `kvanta bench attention --device cuda`: each format is verified against the reference,
    then timed by the GPU's own clock, in turns with a copy of its memory. Times are in ns.

    `share_of_limit`: stored bytes per second / the copy's bytes read and written. InputError without a GPU.
    """
    shape = _checked(heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)
    work = _checked(batch=batch, context=context, query_tokens=query_tokens)
    real_number("seconds", seconds, 0.0, 3600.0)
    return _core.run_gpu_attention_bench(formats=_texts(formats), **shape, **work, seconds=seconds, measured=measured)


def _checked(**sizes: int) -> dict[str, int]:
    return {name: whole_number(name, value, 1, 2**31 - 1) for name, value in sizes.items()}


def _texts(formats: Sequence[str]) -> list[str]:
    return [text("a format", name) for name in each_of("formats", formats, "names of formats")]
