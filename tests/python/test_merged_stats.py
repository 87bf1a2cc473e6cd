"""Statistics of replicas as those of one engine."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from stories import GREEDY, PROMPT

from kvanta import LLM
from kvanta.ray.merged_stats import merged_stats
from kvanta.server.jobs.metrics import Metrics


@pytest.fixture(scope="module")
def engines() -> list[dict[str, Any]]:
    """One that has worked, and one that has worked twice as much."""
    with warnings.catch_warnings(action="ignore"):  # no scales were given
        llm = LLM("stories260k", kv_cache_dtype="fp8", kv_cache_memory_bytes="8MiB", threads=1)
    llm.generate(PROMPT, GREEDY)
    first = copy.deepcopy(llm.stats())
    llm.generate(PROMPT, GREEDY)
    return [first, llm.stats()]


def test_one_engine_is_itself(engines: list[dict[str, Any]]) -> None:
    assert merged_stats(engines[:1]) == engines[0]


def test_counters_and_memory_are_sums(engines: list[dict[str, Any]]) -> None:
    a, b = engines
    found = merged_stats(engines)
    assert found.keys() == a.keys()
    for name in ("steps", "generated_tokens", "seconds_total", "seconds_forward", "cache_budget_bytes"):
        assert found[name] == a[name] + b[name] > 0, name
    for name in ("bytes_per_token", "page_size", "threads", "weight_bytes", "isa", "kv_cache_dtype"):
        assert found[name] == a[name] == b[name], name
    assert found["saturated"] == a["saturated"] + b["saturated"]
    assert found["finished"]["length"] == 1 + 2
    assert found["step_tokens"] == [(bound, x + y) for (bound, x), (_, y) in zip(*_rows(engines), strict=True)]
    for merged, x, y in zip(found["layers"], a["layers"], b["layers"], strict=True):
        assert (merged["scheme"], merged["k_scale"]) == (x["scheme"], x["k_scale"])
        assert merged["k"]["values"] == x["k"]["values"] + y["k"]["values"] > 0
    assert found["groups"][0]["layers"] == a["groups"][0]["layers"]


def _rows(engines: list[dict[str, Any]]) -> list[list[tuple[float, int]]]:
    return [each["step_tokens"] for each in engines]


def test_divergence_is_a_mean_over_tokens_and_a_maximum(engines: list[dict[str, Any]]) -> None:
    a, b = (copy.deepcopy(each) for each in engines)
    a["quality"] |= {"requests": 1, "tokens": 10, "kl_mean": 0.2, "kl_max": 0.9}
    b["quality"] |= {"requests": 2, "tokens": 30, "kl_mean": 0.6, "kl_max": 0.7}
    found = merged_stats([a, b])["quality"]
    assert found == {**a["quality"], "requests": 3, "tokens": 40, "kl_mean": pytest.approx(0.5), "kl_max": 0.9}


def test_groups_tiers_and_drafts(engines: list[dict[str, Any]]) -> None:
    a, b = (copy.deepcopy(each) for each in engines)
    a["groups"][0]["pages_used"], b["groups"][0]["pages_used"] = 3, 4
    for each, hits, files in ((a, 5, 7), (b, 6, 7)):
        each["disk"] |= {"enabled": True, "hit_tokens": hits, "files": files}
        each["speculation"] |= {"drafts": hits, "accepted_per_position": [hits, 1], "draft_weight_bytes": 100}
    found = merged_stats([a, b])
    assert found["groups"][0]["pages_used"] == 7
    assert (found["disk"]["hit_tokens"], found["disk"]["files"], found["disk"]["enabled"]) == (11, 7, True)
    speculation = found["speculation"]
    assert (speculation["drafts"], speculation["accepted_per_position"]) == (11, [11, 2])
    assert speculation["draft_weight_bytes"] == 100


def test_replicas_of_prompts_add_their_work_but_no_answers(engines: list[dict[str, Any]]) -> None:
    a, b = engines
    found = merged_stats([a], [b])
    assert (found["generated_tokens"], found["finished"]) == (a["generated_tokens"], a["finished"])
    assert found["steps"] == a["steps"] + b["steps"]


def test_replicas_of_another_model_during_an_update(engines: list[dict[str, Any]]) -> None:
    other = {**engines[1], "layers": engines[1]["layers"][:2]}
    found = merged_stats([engines[0], other])
    assert found["layers"] == engines[0]["layers"]
    assert found["steps"] == engines[0]["steps"] + other["steps"]
    assert list(Metrics("m", lambda: found).collect())
