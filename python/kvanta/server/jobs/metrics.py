"""Prometheus metrics: the engine's counters, read at every scrape, and the server's own.

Names follow vLLM's, with the prefix kvanta: instead of vllm:.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import operator
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from kvanta import _core
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.jobs.vllm_metrics import vllm_families, with_vllm_names

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_TEXTS = (1, 2, 5, 10, 20, 50, 100)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)

_LAYER_COUNTS = {
    "values": ("kv_values", "Values quantized into the cache."),
    "saturated": ("kv_saturated_values", "Values beyond the format's range."),
    "nan": ("kv_nan_values", "Values that were not a number."),
    "blocks": ("kv_blocks", "Scales of blocks."),
    "zero_blocks": ("kv_zero_blocks", "Scales of blocks that are zero."),
}


class EngineMetric(NamedTuple):
    """A value of the engine's statistics that is exported unchanged as a metric."""

    path: str
    """Its place in the statistics: keys with dots between them."""
    kind: str
    name: str
    text: str
    condition: str
    """Path of a value without which there is no metric; empty: none."""


_ENGINE_METRICS = [EngineMetric(*each) for each in _core.engine_metrics()]


def value_at(stats: Mapping[str, Any], path: str) -> Any:
    """The value at this place of the statistics."""
    return functools.reduce(operator.getitem, path.split("."), stats)


class Histogram:
    """Counts by upper bound. prometheus_client's own would cost a lock and a loop for every token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str, model: str) -> HistogramMetricFamily:
        """Metric in Prometheus' form, cumulative."""
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([model], buckets, self._sum)
        return family


class RecentMaximum:
    """The maximum of the last one or two periods."""

    def __init__(self, period_s: float = 30.0) -> None:
        self._period = period_s
        self._begin = 0.0
        self._current = self._previous = 0.0

    def observe(self, value: float, now: float) -> None:
        """Counts one value. `now`: time.perf_counter()."""
        if now - self._begin >= self._period:
            self._previous = self._current if now - self._begin < 2 * self._period else 0.0
            self._begin, self._current = now, 0.0
        self._current = max(self._current, value)

    def value(self, now: float) -> float:
        """0 if there was none."""
        self.observe(0.0, now)
        return max(self._current, self._previous)


class Metrics(Collector):
    """Written by the event loop's thread alone; `stats` gives the engine's counters."""

    def __init__(
        self, model: str, stats: Callable[[], dict[str, Any]], cache: Mapping[str, object] = MappingProxyType({})
    ) -> None:
        """`cache`: settings of the KV cache, for cache_config_info."""
        self.vllm_names = False
        self._cache = {name: str(value) for name, value in cache.items()}
        self._model = model
        self._stats = stats
        self.time_to_first_token = Histogram(_SECONDS)
        self.queue_seconds = Histogram(_SECONDS)
        self.inter_token = Histogram(_SECONDS)
        self.largest_gap = RecentMaximum()
        self.request_seconds = Histogram(_SECONDS)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generated_tokens = Histogram(_TOKENS)
        self.inference_seconds = Histogram(_SECONDS)
        self.prefill_seconds = Histogram(_SECONDS)
        self.decode_seconds = Histogram(_SECONDS)
        self.seconds_per_token = Histogram(_SECONDS)
        self.preemptions = Histogram(_PREEMPTIONS)
        self.computed_tokens = Histogram(_TOKENS)
        self.longest_text = Histogram(_TOKENS)
        self.requested_texts = Histogram(_TEXTS)
        self.requested_tokens = Histogram(_TOKENS)
        self.outcomes: Counts[str] = Counts({"stop": 0, "length": 0, "abort": 0, "error": 0})
        """Sequences that the engine has ended, by finish reason."""
        self.rejections: Counts[str] = Counts({"max_num_queued_reqs": 0})
        """Requests that were refused, by the limit."""
        self.responses: Counts[tuple[str, str]] = Counts()
        """HTTP responses by (endpoint, status)."""

    def observe_params(self, params: SamplingParams) -> None:
        """Counts the parameters of one prompt."""
        self.requested_texts.observe(params.n)
        if params.max_tokens is not None:
            self.requested_tokens.observe(params.max_tokens)

    def observe_progress(self, last: _core.EngineOutput, prompt_tokens: int, tokens: int) -> None:
        """Counts the engine's times and work of a finished sequence. `last`: its last output with a token."""
        times = last.times
        self.preemptions.observe(last.preemptions)
        self.computed_tokens.observe(prompt_tokens - last.cached_tokens)
        decode = times.last_token - times.first_token
        self.inference_seconds.observe(times.last_token - times.scheduled)
        self.prefill_seconds.observe(times.first_token - times.scheduled)
        self.decode_seconds.observe(decode)
        if tokens > 1:
            self.seconds_per_token.observe(decode / (tokens - 1))

    def collect(self) -> Iterable[Metric]:
        """Called for every scrape."""
        stats = self._stats()
        families = self._families(stats)
        return [*with_vllm_names(families), *vllm_families(self._model, stats)] if self.vllm_names else families

    def engine_families(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """Metrics of an engine with these counters."""
        yield from self._engine_values(stats)
        yield from self._engine_gauges(stats)
        yield from self._engine_counters(stats)
        yield from self._loads(stats)
        yield from self._speculation(stats["speculation"])

    def _families(self, stats: dict[str, Any]) -> Iterator[Metric]:
        yield from self.engine_families(stats)
        yield from self._layers(stats)
        yield from self._quality(stats["quality"])
        yield from self._server()

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"kvanta:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"kvanta:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _engine_values(self, stats: dict[str, Any]) -> Iterator[Metric]:
        for each in _ENGINE_METRICS:
            if each.condition and not value_at(stats, each.condition):
                continue
            family = self._gauge if each.kind == "gauge" else self._counter
            yield family(each.name, each.text, value_at(stats, each.path))

    def _engine_gauges(self, stats: dict[str, Any]) -> Iterator[Metric]:
        budget = stats["cache_budget_bytes"]
        share = stats["cache_used_bytes"] / budget
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's memory in use, prefix cache included.", share)
        info = GaugeMetricFamily(
            "kvanta:cache_config_info", "Settings of the KV cache.", labels=["model_name", *self._cache]
        )
        info.add_metric([self._model, *self._cache.values()], 1)
        yield info
        used_bytes = GaugeMetricFamily(
            "kvanta:kv_cache_used_bytes", "Cache memory in use, by format.", labels=["model_name", "format"]
        )
        by_format: Counts[str] = Counts()
        for group in stats["groups"]:
            for layer in (stats["layers"][index] for index in group["layers"]):
                pages = (group["pages_used"], *group["level_pages_used"])
                for level, used in zip(layer["levels"], pages, strict=True):
                    by_format[level["scheme"]] += level["page_bytes"] * used
        for name, count in by_format.items():
            used_bytes.add_metric([self._model, name], count)
        exact = sum(group["exact_pages_used"] * group["exact_page_bytes"] for group in stats["groups"])
        if stats["exact_page_bytes"]:
            used_bytes.add_metric([self._model, "exact"], exact)
        yield used_bytes
        levels = list(
            itertools.zip_longest(*((g["pages_used"], *g["level_pages_used"]) for g in stats["groups"]), fillvalue=0)
        )
        if len(levels) > 1:
            by_level = GaugeMetricFamily(
                "kvanta:kv_cache_level_pages",
                "Pages by level, with precision by age or by pressure.",
                labels=["model_name", "level"],
            )
            for level, used in enumerate(levels):
                by_level.add_metric([self._model, str(level)], max(used))
            yield by_level

    def _engine_counters(self, stats: dict[str, Any]) -> Iterator[Metric]:
        cached, prompt, generated = (stats[f"{kind}_tokens"] for kind in ("cached", "prompt", "generated"))
        if "moved" in stats:  # of several engines
            yield self._gauge("replicas", "Engines that have reported lately.", stats["replicas"])
            yield self._counter("requests_moved", "Requests that went on at another replica.", stats["moved"])
        yield self._counter("prompt_tokens", "Prompt tokens, cached ones included.", prompt + cached)
        yield self._counter("prompt_tokens_cached", "Of these, found in the prefix cache.", cached)
        step_tokens = HistogramMetricFamily(
            "kvanta:iteration_tokens_total", "Prompt tokens and new ones of a step.", labels=["model_name"]
        )
        bounds = ("+Inf" if math.isinf(bound) else str(bound) for bound, _ in stats["step_tokens"])
        counts = itertools.accumulate(steps for _, steps in stats["step_tokens"])
        step_tokens.add_metric([self._model], list(zip(bounds, counts, strict=True)), prompt + generated)
        yield step_tokens

    def _loads(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """Nothing without a tier of the prefix cache below the memory."""
        if any(stats[tier]["enabled"] for tier in ("host", "disk", "store")):
            yield self._gauge("num_requests_loading", "Waiting requests whose pages are read.", stats["loading"])

    def _speculation(self, counts: dict[str, Any]) -> Iterator[Metric]:
        """Nothing without speculative decoding."""
        if not counts["accepted_per_position"]:
            return
        by_position = CounterMetricFamily(
            "kvanta:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their position in the draft.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(counts["accepted_per_position"]):
            by_position.add_metric([self._model, str(position)], count)
        yield by_position

    def _layers(self, stats: dict[str, Any]) -> Iterator[Metric]:
        for key, (name, text) in _LAYER_COUNTS.items():
            family = CounterMetricFamily(f"kvanta:{name}", text, labels=["model_name", "layer", "side"])
            for index, layer in enumerate(stats["layers"]):
                for side in ("k", "v"):
                    family.add_metric([self._model, str(index), side], layer[side][key])
            yield family

    def _quality(self, quality: dict[str, Any]) -> Iterator[Metric]:
        divergence = SummaryMetricFamily(
            "kvanta:sampled_kl_divergence_nats",
            "KL(exact cache || served cache) per generated token of sampled requests.",
            labels=["model_name"],
        )
        tokens = quality["tokens"]
        divergence.add_metric([self._model], count_value=tokens, sum_value=quality["kl_mean"] * tokens)
        yield divergence
        yield self._gauge("sampled_kl_divergence_max_nats", "The largest of them.", quality["kl_max"])
        yield self._counter("sampled_requests", "Requests that were compared.", quality["requests"])
        yield self._counter("sampled_requests_skipped", "Sampled, but not compared.", quality["skipped"])
        yield self._gauge("sampled_requests_pending", "That wait for idle time.", quality["pending"])

    def _server(self) -> Iterator[Metric]:
        yield self.time_to_first_token.family(
            "kvanta:time_to_first_token_seconds", "From a request's arrival to its first token.", self._model
        )
        yield self.queue_seconds.family(
            "kvanta:request_queue_time_seconds", "In the engine's queue, until first scheduled.", self._model
        )
        yield self.inter_token.family(
            "kvanta:inter_token_latency_seconds", "Between two tokens of a sequence.", self._model
        )
        yield self._gauge(
            "inter_token_latency_max_seconds",
            "Longest time between two tokens of a sequence in the last half or whole minute.",
            self.largest_gap.value(time.perf_counter()),
        )
        yield self.request_seconds.family(
            "kvanta:e2e_request_latency_seconds", "From a request's arrival to a sequence's end.", self._model
        )
        for name, text, histogram in (
            ("request_inference_time_seconds", "From being scheduled to the last token.", self.inference_seconds),
            ("request_prefill_time_seconds", "From being scheduled to the first token.", self.prefill_seconds),
            ("request_decode_time_seconds", "From the first token to the last one.", self.decode_seconds),
            ("request_time_per_output_token_seconds", "Decode time per token after the first.", self.seconds_per_token),
            ("request_num_preemptions", "Preemptions of a sequence.", self.preemptions),
            ("request_prefill_kv_computed_tokens", "Prompt tokens that the cache did not have.", self.computed_tokens),
            ("request_max_num_generation_tokens", "New tokens of a prompt's longest text.", self.longest_text),
            ("request_params_n", "Texts requested for a prompt.", self.requested_texts),
            ("request_params_max_tokens", "New tokens that a prompt allowed per text.", self.requested_tokens),
        ):
            yield histogram.family(f"kvanta:{name}", text, self._model)
        yield self.prompt_tokens.family("kvanta:request_prompt_tokens", "Prompt tokens of a sequence.", self._model)
        yield self.generated_tokens.family("kvanta:request_generation_tokens", "New tokens of a sequence.", self._model)
        outcomes = CounterMetricFamily(
            "kvanta:request_success", "Sequences that have ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.outcomes.items():
            outcomes.add_metric([self._model, reason], count)
        yield outcomes
        rejections = CounterMetricFamily(
            "kvanta:admission_rejections", "Requests refused for a full queue.", labels=["model_name", "reason"]
        )
        for limit, count in self.rejections.items():
            rejections.add_metric([self._model, limit], count)
        yield rejections
        responses = CounterMetricFamily(
            "kvanta:http_responses", "HTTP responses.", labels=["model_name", "endpoint", "status"]
        )
        for (endpoint, status), count in sorted(self.responses.items()):
            responses.add_metric([self._model, endpoint, status], count)
        yield responses
