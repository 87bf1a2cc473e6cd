"""--metrics-prefix vllm: vLLM's names next to ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from kvanta import _core
from kvanta.server.jobs.metrics import value_at
from kvanta.server.jobs.vllm_metrics import NAMES
from kvanta.server.options import read_options

# Metrics of LoRA adapters, watermarks, parallel or sleeping engines and transfers of caches are not among them.
VLLM = """
admission_rejections cache_config_info e2e_request_latency_seconds engine_sleep_state external_prefix_cache_hits
external_prefix_cache_queries generation_tokens inter_token_latency_seconds iteration_tokens_total kv_cache_usage_perc
mm_cache_hits mm_cache_queries num_preemptions num_requests_running num_requests_waiting num_requests_waiting_by_reason
prefix_cache_hits prefix_cache_queries prompt_tokens prompt_tokens_by_source prompt_tokens_cached
prompt_tokens_cached_by_source request_decode_time_seconds request_generation_tokens request_inference_time_seconds
request_max_num_generation_tokens request_num_preemptions request_params_max_tokens request_params_n
request_prefill_kv_computed_tokens request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds
request_success request_time_per_output_token_seconds spec_decode_num_accepted_tokens
spec_decode_num_accepted_tokens_per_pos spec_decode_num_draft_tokens spec_decode_num_drafts time_to_first_token_seconds
"""
DOCS = Path(__file__).parents[2].joinpath("docs/serve.md").read_text(encoding="utf-8")
Samples = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(options={"speculative_config": {"method": "ngram"}}) as running:
        yield running


def families_of(server: LiveServer) -> set[str]:
    return {family.name for family in text_string_to_metric_families(server.client.get("/metrics").text)}


def scrape(server: LiveServer) -> tuple[Samples, dict[str, dict[str, str]]]:
    """Values by (name, bound of a bucket or finished_reason), and the labels of each name."""
    values: Samples = {}
    labels: dict[str, dict[str, str]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            key = sample.labels.get("le") or sample.labels.get("finished_reason") or ""
            values[sample.name, key] = sample.value
            labels[sample.name] = sample.labels
    return values, labels


@pytest.mark.parametrize("escaping", ["", ";escaping=underscores", ";escaping=allow-utf-8", ";escaping=values"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_names_are_the_same_in_every_format(server: LiveServer, kind: str, escaping: str) -> None:
    """Prometheus 2 accepts OpenMetrics 1.0.0 and does not mention escaping."""
    for version in (";version=1.0.0", "", ";version=none"):
        accept = f"{kind}{version}{escaping};q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
        answer = server.client.get("/metrics", headers={"Accept": accept})
        assert answer.status_code == 200
        is_open = "openmetrics" in answer.headers["content-type"]
        assert is_open == ("openmetrics" in kind and "none" not in version)
        parse = openmetrics_families if is_open else text_string_to_metric_families
        samples = {sample.name for family in parse(answer.text) for sample in family.samples}
        assert {"kvanta:num_requests_running", "kvanta:prompt_tokens_total"} <= samples
        assert all(name.startswith("kvanta:") for name in samples)


def test_statistics_that_are_metrics_have_their_values(server: LiveServer) -> None:
    server.completion(prompt="Once", max_tokens=5)
    before = server.front.loaded.stats()
    values, _ = scrape(server)
    after = server.front.loaded.stats()
    paths = set()
    for path, kind, name, text, condition in _core.engine_metrics():
        key = (f"kvanta:{name}{'_total' if kind == 'counter' else ''}", "")
        assert text.endswith("."), path
        # The page lists the metrics of these two tiers in one line each, after those of the folder.
        documented = re.sub(r"^(host|store)_cache_.*", r"\1_cache_*", key[0].removeprefix("kvanta:"))
        assert f"`{documented}`" in DOCS, path
        paths.add(path)
        if condition and not value_at(after, condition):
            assert key not in values, path
        else:
            assert value_at(before, path) <= values[key] <= value_at(after, path), path
    assert {"generated_tokens", "speculation.drafts", "speculation.seconds_draft", "disk.own_bytes"} <= paths


def test_vllm_names_are_added_on_request(server: LiveServer) -> None:
    ours, _ = scrape(server)
    assert not [name for name, _ in ours if name.startswith("vllm:")]
    server.front.metrics.vllm_names = read_options({"metrics_prefix": "vllm"}).metrics_prefix == "vllm"
    server.completion(prompt="Once", max_tokens=5, n=2, temperature=0)
    values, labels = scrape(server)
    families = {name.removeprefix("vllm:") for name, _ in values if name.startswith("vllm:")}
    bases = {
        name.removesuffix("_total").removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in families
    }
    assert {base.removesuffix("_created") for base in bases} >= NAMES - {"iteration_tokens_total"}
    # Metrics that vLLM 0.33 has in any configuration (v1/metrics/loggers.py); prometheus_client adds _total.
    assert {name.removesuffix("_total") for name in families_of(server) if name.startswith("vllm:")} == {
        f"vllm:{name}".removesuffix("_total") for name in VLLM.split()
    }
    for (name, key), value in values.items():
        shared = name.replace("vllm:", "kvanta:"), key
        if name.startswith("vllm:") and not name.endswith("_created") and shared in values:
            assert value == values[name.replace("vllm:", "kvanta:"), key]
            assert labels[name]["engine"] == "0"
            assert labels[name]["model_name"]
    info = labels["vllm:cache_config_info"]
    assert info["block_size"] == "64"
    assert int(info["num_gpu_blocks"]) == server.front.loaded.summary().tokens // 64
    server.front.metrics.vllm_names = False


def test_times_and_parameters_are_counted(server: LiveServer) -> None:
    before, _ = scrape(server)
    server.completion(prompt="Once", max_tokens=5, n=2, temperature=0, ignore_eos=True)
    after, _ = scrape(server)

    def grown(name: str) -> float:
        return after["kvanta:" + name, ""] - before["kvanta:" + name, ""]

    for name in ("inference_time", "prefill_time", "decode_time", "time_per_output_token"):
        assert grown(f"request_{name}_seconds_count") == 2
    inference = grown("request_inference_time_seconds_sum")
    prefill, decode = grown("request_prefill_time_seconds_sum"), grown("request_decode_time_seconds_sum")
    assert inference == pytest.approx(prefill + decode)
    assert decode == pytest.approx(4 * grown("request_time_per_output_token_seconds_sum"))
    assert (grown("request_params_n_count"), grown("request_params_n_sum")) == (1, 2)
    assert grown("request_params_max_tokens_sum") == 5
    assert grown("request_num_preemptions_count") == 2
    assert (grown("request_max_num_generation_tokens_count"), grown("request_max_num_generation_tokens_sum")) == (1, 5)
    prompt = len(server.post("/tokenize", prompt="Once").json()["tokens"])
    assert grown("request_prefill_kv_computed_tokens_sum") == 2 * prompt
    steps = grown("iteration_tokens_total_count")
    assert 5 <= steps <= 10  # the two texts may be in the same steps
    assert grown("iteration_tokens_total_sum") == 2 * prompt + 10
    assert after["kvanta:iteration_tokens_total_bucket", "+Inf"] == after["kvanta:iteration_tokens_total_count", ""]


def test_refused_requests_are_counted(server: LiveServer) -> None:
    def count() -> float:
        name = "kvanta:admission_rejections_total"
        return next(value for (each, _), value in scrape(server)[0].items() if each == name)

    before = count()
    capacity = server.front.capacity
    give_back = server.on_loop(lambda: server.front.admit(capacity))
    try:
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 429
    finally:
        server.on_loop(give_back)
    assert count() == before + 1
