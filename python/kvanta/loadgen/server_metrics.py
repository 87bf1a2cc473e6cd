"""A server's own counters, from the text of its /metrics: Kvanta's, and vLLM's under the same names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import aiohttp

from kvanta.loadgen.client import fetch_text
from kvanta.loadgen.records import LoadError

_SAMPLE = re.compile(r"(\w+):(\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COUNTERS = {
    "preemptions": "num_preemptions_total",
    "prefix_queried_tokens": "prefix_cache_queries_total",
    "prefix_hit_tokens": "prefix_cache_hits_total",
}


@dataclass(frozen=True)
class ServerMetrics:
    """The server's description of itself; empty where it gives none."""

    engine: str | None = None
    """The prefix of its metrics."""
    cache_dtype: str | None = None
    counters: dict[str, float] = field(default_factory=dict)

    def since(self, earlier: ServerMetrics) -> dict[str, int]:
        """Increases of the counters since `earlier`."""
        return {name: round(value - earlier.counters.get(name, 0.0)) for name, value in self.counters.items()}


def parse_metrics(text: str) -> ServerMetrics:
    """Parses the Prometheus text format; lines of other metrics and damaged lines are skipped."""
    engine = cache_dtype = None
    counters: dict[str, float] = {}
    for prefix, name, labels, value in _samples(text):
        engine = engine or prefix
        if name == "cache_config_info":  # vLLM's
            cache_dtype = labels.get("cache_dtype")
        for counter, metric in _COUNTERS.items():
            if name == metric and prefix == engine:  # --metrics-prefix vllm shows the same ones twice
                counters[counter] = counters.get(counter, 0.0) + value
    return ServerMetrics(engine, cache_dtype, counters)


def _samples(text: str) -> Iterator[tuple[str, str, dict[str, str], float]]:
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found:
            try:
                value = float(found[4])
            except ValueError:
                continue
            if abs(value) < 1e18:
                yield found[1], found[2], dict(_LABEL.findall(found[3] or "")), value


async def read_metrics(session: aiohttp.ClientSession, base: str) -> ServerMetrics:
    """Empty where the server has none."""
    try:
        return parse_metrics(await fetch_text(session, "GET", f"{base}/metrics"))
    except LoadError:
        return ServerMetrics()
