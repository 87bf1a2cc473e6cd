"""--metrics-prefix vllm: vLLM's names next to ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families

from kvanta.server.options import read_options
from kvanta.server.vllm_metrics import NAMES

Samples = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(options={"speculative_config": {"method": "ngram"}}) as running:
        yield running


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
    assert {base.removesuffix("_created") for base in bases} == NAMES
    for (name, key), value in values.items():
        if name.startswith("vllm:") and not name.endswith("_created"):
            assert value == values[name.replace("vllm:", "kvanta:"), key]
            assert labels[name]["engine"] == "0"
            assert labels[name]["model_name"]
    info = labels["vllm:cache_config_info"]
    assert info["block_size"] == "64"
    assert int(info["num_gpu_blocks"]) > 0
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
