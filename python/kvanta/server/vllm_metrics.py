"""Metrics under the names of vLLM 0.33, next to our own: `--metrics-prefix vllm`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric

OURS = "kvanta:"
THEIRS = "vllm:"
# Families of ours that vLLM has with the same meaning.
NAMES = frozenset(
    (
        "cache_config_info",
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
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
        "request_num_preemptions",
        "request_params_max_tokens",
        "request_params_n",
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
    """Every family, and behind it a copy with vLLM's name and label `engine`, if vLLM has it."""
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
