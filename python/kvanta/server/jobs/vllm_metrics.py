"""Metrics under the names of vLLM 0.33, next to our own: `--metrics-prefix vllm`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

OURS = "kvanta:"
THEIRS = "vllm:"
# Families of Kvanta that vLLM has with the same meaning.
NAMES = frozenset(
    (
        "admission_rejections",
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "iteration_tokens_total",
        "kv_cache_usage_perc",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "prompt_tokens_cached",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_max_num_generation_tokens",
        "request_num_preemptions",
        "request_params_max_tokens",
        "request_params_n",
        "request_prefill_kv_computed_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_drafts",
        "time_to_first_token_seconds",
    )
)


def with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """Every family, each followed by a copy with vLLM's name and label `engine` if vLLM has it."""
    for family in families:
        yield family
        name = family.name.removeprefix(OURS)
        if name not in NAMES:
            continue
        copy = Metric(THEIRS + name, family.documentation, family.type)
        copy.samples = [
            sample._replace(name=THEIRS + sample.name.removeprefix(OURS), labels={**sample.labels, "engine": "0"})
            for sample in family.samples
        ]
        yield copy


def vllm_families(model: str, stats: Mapping[str, Any]) -> Iterator[Metric]:
    """Families that vLLM alone has. Those of parts that are not here have a value, too: nothing was counted."""
    prompt, cached = stats["prompt_tokens"], stats["cached_tokens"]
    elsewhere = ("host", "p2p", "disk", "external_unspecified")
    counters: dict[str, tuple[str, dict[str, int]]] = {
        "prompt_tokens_by_source": (
            "source",
            {"local_compute": prompt, "local_cache_hit": cached, "external_kv_transfer": 0},
        ),
        "prompt_tokens_cached_by_source": ("source", {"device": cached, **dict.fromkeys(elsewhere, 0)}),
        **{
            f"{cache}_cache_{what}": ("", {"": 0})
            for cache in ("external_prefix", "mm")
            for what in ("queries", "hits")
        },
    }
    gauges = {
        "num_requests_waiting_by_reason": ("reason", {"capacity": stats["waiting"], "deferred": 0}),
        "engine_sleep_state": ("sleep_state", {"awake": 1, "weights_offloaded": 0, "discard_all": 0}),
    }
    for kind, families in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, (label, values) in families.items():
            family = kind(
                THEIRS + name, "As vLLM counts it.", labels=["model_name", "engine", *([label] if label else [])]
            )
            for key, value in values.items():
                family.add_metric([model, "0", *([key] if label else [])], value)
            yield family
