"""RAM below a GPU's memory: the option, its errors and its figures. That it works: tests/engine/gpu_offload_test.cc."""

import math
from typing import Any

import pytest
from command_line import kvanta

from kvanta import LLM
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.errors import InputError


def test_its_size_is_written_like_others() -> None:
    folder = str(resolve_model("stories260k").path)
    assert engine_config(folder, {"kv_offload_bytes": "64GiB"}).kv_offload_bytes == 64 << 30
    assert engine_config(folder, {"kv_offload_bytes": None}).kv_offload_bytes == 0
    with pytest.raises(InputError, match=r"kv_offload_bytes: '64 parsecs' is not a size in bytes"):
        engine_config(folder, {"kv_offload_bytes": "64 parsecs"})


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_on_a_cpu_the_error_says_what_to_do(device: str) -> None:
    message = "kv_offload_bytes = 1073741824: .* give these bytes to kv_cache_memory_bytes"
    with pytest.raises(InputError, match=message):
        LLM("stories260k", device=device, kv_offload_bytes="1GiB")


def test_it_needs_the_prefix_cache() -> None:
    with pytest.raises(InputError, match="kv_offload_bytes = 1024: needs enable_prefix_caching"):
        LLM("stories260k", device="cuda", kv_offload_bytes=1024, enable_prefix_caching=False)


def test_the_command_line_has_it() -> None:
    done = kvanta("generate", "stories260k", "Once", "--kv-offload-bytes", "1GiB")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "kv_cache_memory_bytes" in line


def test_options_of_others_name_it() -> None:
    for name, value in (("kv_offloading_size", 8), ("enable_hierarchical_cache", True)):
        options: dict[str, Any] = {name: value}
        with pytest.warns(UserWarning, match=f"{name} .*--kv-offload-bytes keeps a GPU's pages in RAM"):
            LLM("stories260k", max_model_len=64, threads=1, **options)


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    """Statistics of an engine without the tier."""
    return LLM("stories260k", max_model_len=64, threads=1).stats()


def test_without_it_there_are_no_metrics(counts: dict[str, Any]) -> None:
    metrics = pytest.importorskip("kvanta.server.jobs.metrics")
    assert not counts["host"]["enabled"]
    assert not any(counts["host"].values())
    families = metrics.Metrics("m", lambda: counts).collect()
    assert not [family.name for family in families if "host_cache" in family.name]


def test_its_metrics(counts: dict[str, Any]) -> None:
    metrics = pytest.importorskip("kvanta.server.jobs.metrics")
    tokens = 1000
    host = {
        **counts["host"],
        "enabled": True,
        "records": 3,
        "bytes": 5000,
        "limit_bytes": math.ceil(tokens * counts["bytes_per_token"]),
        "hit_tokens": 64,
        "evictions": 2,
    }
    with_ram = {**counts, "host": host}
    samples = {
        sample.name: sample.value
        for family in metrics.Metrics("m", lambda: with_ram).collect()
        for sample in family.samples
        if "host_cache" in sample.name
    }
    assert samples["kvanta:host_cache_hits_total"] == 64
    assert samples["kvanta:host_cache_records"] == 3
    assert samples["kvanta:host_cache_used_bytes"] == 5000
    assert samples["kvanta:host_cache_limit_bytes"] == host["limit_bytes"]
    assert samples["kvanta:host_cache_evictions_total"] == 2
