"""A replica's metrics for Ray's dashboard and Prometheus endpoints: those of /metrics, with _ for the colon."""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge

from kvanta.server.jobs.metrics import Metrics


class ClusterMetrics:
    """Ray adds the replica's tags and exports every metric as ray_NAME."""

    def __init__(self, model: str) -> None:
        self._metrics = Metrics(model, dict)
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._counted: dict[tuple[str, ...], float] = {}

    def update(self, stats: dict[str, Any]) -> None:
        """Takes the engine's counters. On one thread at a time."""
        for family in self._metrics.engine_families(stats):
            for sample in family.samples:
                name, keys = sample.name.replace(":", "_"), tuple(sample.labels)
                if family.type == "gauge":
                    gauge = self._gauges.get(name)
                    if gauge is None:
                        gauge = self._gauges[name] = Gauge(name, family.documentation, keys)
                    gauge.set(sample.value, sample.labels)
                elif family.type == "counter":
                    counter = self._counters.get(name)
                    if counter is None:
                        counter = self._counters[name] = Counter(name, family.documentation, keys)
                    series = (name, *sample.labels.values())
                    gained = sample.value - self._counted.get(series, 0.0)
                    if gained > 0:
                        counter.inc(gained, sample.labels)
                        self._counted[series] = sample.value
