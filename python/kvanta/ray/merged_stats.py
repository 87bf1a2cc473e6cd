"""Statistics of several engines as those of one, for /metrics of a server with replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ONE_ENGINES = frozenset(
    {
        "model",
        "kv_cache_dtype",
        "page_size",
        "page_bytes",
        "exact_page_bytes",
        "level_page_bytes",
        "bytes_per_token",
        "weight_bytes",
    }
    | {"backend", "isa", "device", "threads", "profile", "draft_weight_bytes"}
    | {"enabled", "scheme", "visibility", "k_scale", "v_scale"}
)
"""Fields that replicas of one deployment have in common, or that say nothing of several together: the first one's."""
_ANSWERS = frozenset({"generated_tokens", "cached_tokens", "prefix_queries", "refused", "finished", "quality"})
"""Fields to which replicas that compute prompts for others do not add: each prompt would count twice."""
_SHARED_TIERS = {"disk": frozenset({"files", "bytes", "limit_bytes", "own_bytes"})}
"""Gauges of a tier that replicas of one machine share: the folder."""

Stats = Mapping[str, Any]


def merged_stats(answering: Sequence[Stats], prefill: Sequence[Stats] = ()) -> dict[str, Any]:
    """Sums of counters and of memory; maxima and means of what is one.

    `answering`: at least one. `prefill`: replicas that compute prompts for these.
    """
    every = [*answering, *prefill]
    engines = {name: answering if name in _ANSWERS else every for name in every[0]}
    return {name: _merged(name, [each[name] for each in those]) for name, those in engines.items()}


def _merged(name: str, values: Sequence[Any]) -> Any:
    if name == "quality":
        return _quality(values)
    if name == "step_tokens":  # (upper bound, steps)
        return [(rows[0][0], sum(count for _, count in rows)) for rows in _aligned(values)]
    if name == "groups":
        return [_fields(rows, frozenset({"layers"})) for rows in _aligned(values)]
    if isinstance(values[0], Mapping):
        return _fields(values, _SHARED_TIERS.get(name, frozenset()))
    if name in _ONE_ENGINES or isinstance(values[0], str):
        return values[0]
    if isinstance(values[0], list):  # layers, or counts by position
        return [_merged("", entries) for entries in _aligned(values)]
    return sum(values)


def _aligned(lists: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """The entries of lists at each place: during an update, replicas of a model with other layers may report, too."""
    return zip(*(each for each in lists if len(each) == len(lists[0])), strict=True)


def _fields(values: Sequence[Stats], shared: frozenset[str]) -> dict[str, Any]:
    """Merges dictionaries field by field; `shared`: fields that are the first one's."""
    return {
        name: values[0][name] if name in shared else _merged(name, [each[name] for each in values])
        for name in values[0]
    }


def _quality(values: Sequence[Stats]) -> dict[str, Any]:
    """Figures of shadow evaluation: the mean is that of all tokens."""
    total = {name: sum(each[name] for each in values) for name in values[0] if not name.startswith("kl_")}
    tokens = total["tokens"]
    total["kl_mean"] = sum(each["kl_mean"] * each["tokens"] for each in values) / tokens if tokens else 0.0
    total["kl_max"] = max(each["kl_max"] for each in values)
    return total
