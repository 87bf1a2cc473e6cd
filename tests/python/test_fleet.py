"""`kvanta plan --fleet`: figures that can be told without the simulator, and its manners."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from command_line import kvanta

from kvanta import InputError
from kvanta.fleet.cache import BlockCache
from kvanta.fleet.costs import ReplicaCosts, read_costs
from kvanta.fleet.simulate import ROUTINGS, Fleet, replicas_needed, simulate
from kvanta.loadgen.workload import PlannedRequest, Workload

COSTS = ReplicaCosts(step_s=0.01, prefill_token_s=0.001, max_num_batched_tokens=100)
BLOCK = 100


def workload_of(*requests: tuple[float, int, int, tuple[int, ...]]) -> Workload:
    planned = [
        PlannedRequest(index, arrival, tokens, answer, blocks, BLOCK if blocks else 0)
        for index, (arrival, tokens, answer, blocks) in enumerate(requests)
    ]
    return Workload(tuple(planned), {"kind": "test", "file": "test"})


def fleet_of(**changes: Any) -> Fleet:
    return Fleet(
        **{
            "replicas": 1,
            "routing": "round-robin",
            "capacity_tokens": 100_000,
            "bytes_per_token": 1000.0,
            "costs": COSTS,
            **changes,
        }
    )


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    report = simulate(workload_of((0.0, 250, 5, ())), fleet_of())
    assert report["ttft_p50_s"] == pytest.approx(0.25)
    assert report["seconds"] == pytest.approx(0.25 + 4 * 0.01)
    assert report["hit_rate"] == 0


def test_prompts_do_not_stall_streams_and_short_ones_pass() -> None:
    stream, long, short = (0.0, 50, 200, ()), (0.1, 4000, 1, ()), (0.5, 40, 1, ())
    by_time = simulate(workload_of(stream, long, short), fleet_of())
    any_time = simulate(workload_of(stream, long, short), fleet_of(costs=dataclasses.replace(COSTS, max_step_s=0)))
    assert by_time["ttft_p50_s"] < 0.2, "of the short prompt"
    assert any_time["ttft_p50_s"] > 3
    assert by_time["seconds"] == pytest.approx(any_time["seconds"], rel=0.3)


def test_depth_and_batches_cost() -> None:
    costs = ReplicaCosts(
        step_s=0.01,
        prefill_token_s=0.001,
        prefill_depth_s=1e-6,
        decode_sequence_s=0.002,
        decode_depth_s=1e-5,
        max_num_batched_tokens=100,
    )
    report = simulate(workload_of((0.0, 200, 3, ())), fleet_of(costs=costs))
    first = 0.2 + 1e-6 * (200 * 200 / 2)
    assert report["ttft_p50_s"] == pytest.approx(first)
    assert report["seconds"] == pytest.approx(first + 2 * 0.01 + 1e-5 * (201 + 202))
    two = simulate(workload_of((0.0, 100, 11, ()), (0.0, 100, 11, ())), fleet_of(costs=costs))
    alone = simulate(workload_of((0.0, 100, 11, ())), fleet_of(costs=costs))
    assert alone["seconds"] < two["seconds"] < 2 * alone["seconds"]


def test_a_later_arrival_does_not_change_earlier_steps() -> None:
    """Equal steps are taken at once only as far as nothing happens in between."""
    short = simulate(workload_of((0.0, 100, 1000, ())), fleet_of())
    split = simulate(workload_of((0.0, 100, 1000, ()), (50.0, 100, 1, ())), fleet_of())
    assert split["seconds"] == pytest.approx(50.0 + 0.1)
    assert short["seconds"] == pytest.approx(0.1 + 999 * 0.01)


def test_routings_find_what_they_can() -> None:
    """Two conversations of three turns over two replicas, which alternate."""
    turns = []
    for turn in range(3):
        for user in (0, 1):
            blocks = tuple(range(100 * user, 100 * user + 2 + turn))
            turns.append((10.0 * (2 * turn + (user if turn != 1 else 1 - user)), BLOCK * len(blocks) + 10, 2, blocks))
    workload = workload_of(*sorted(turns))
    prompt = sum(tokens for _, tokens, _, _ in turns)
    rates = {name: simulate(workload, fleet_of(replicas=2, routing=name))["cached_tokens"] for name in ROUTINGS}
    best = 2 * (2 + 3) * BLOCK  # all of every turn but the new block
    assert rates["prefix-aware"] == rates["shared-store"] == best
    assert rates["round-robin"] < best
    assert prompt == 2 * (210 + 310 + 410)


def test_the_store_is_used_only_where_it_is_faster() -> None:
    workload = workload_of((0.0, 310, 2, (1, 2, 3)), (10.0, 310, 2, (1, 2, 3)))
    fast = simulate(workload, fleet_of(replicas=2, routing="shared-store"))
    assert fast["loaded_tokens"] == 300
    assert fast["ttft_p50_s"] == pytest.approx(300 * 1000 / 1e9 + 0.01, rel=1e-3)
    slow = ReplicaCosts(**{**vars(COSTS), "load_bytes_per_s": 1e5})
    assert simulate(workload, fleet_of(replicas=2, routing="shared-store", costs=slow))["loaded_tokens"] == 0
    small = fleet_of(replicas=2, routing="shared-store", store_bytes=100 * 1000.0)
    assert simulate(workload, small)["loaded_tokens"] == 100


def test_caches_keep_beginnings_and_what_was_used_last() -> None:
    cache = BlockCache(4)
    cache.add((1, 2, 3))
    cache.add((7, 8))
    assert [cache.match(blocks) for blocks in ((1, 2, 3), (7, 8))] == [2, 2]
    cache.reserved = 2
    cache.add((7, 8))
    assert len(cache) == 2
    assert cache.match((1,)) == 0


def test_replicas_that_share_cpus_slow_each_other_down() -> None:
    both = workload_of((0.0, 100, 1, ()), (0.0, 100, 1, ()))
    assert simulate(both, fleet_of(replicas=2, cpus=2))["ttft_p99_s"] == pytest.approx(0.1)
    shared = simulate(both, fleet_of(replicas=2, cpus=1))
    assert shared["ttft_p50_s"] == shared["ttft_p99_s"] == pytest.approx(0.2)
    apart = workload_of((0.0, 100, 1, ()), (1.0, 100, 1, ()))
    assert simulate(apart, fleet_of(replicas=2, cpus=1))["ttft_p99_s"] == pytest.approx(0.1)


def test_the_front_takes_one_request_after_the_other() -> None:
    costs = ReplicaCosts(**{**vars(COSTS), "front_s": 0.03, "request_s": 0.5, "message_s": 0.02})
    report = simulate(workload_of(*[(0.0, 100, 3, ())] * 3), fleet_of(replicas=3, costs=costs))
    assert report["ttft_p50_s"] == pytest.approx(2 * 0.03 + 0.1 + 0.5)
    assert report["ttft_p99_s"] == pytest.approx(3 * 0.03 + 0.1 + 0.5)
    assert report["seconds"] == pytest.approx(3 * 0.03 + 0.1 + 2 * (0.01 + 0.02))


def test_a_prompt_follows_an_equal_one_that_is_being_computed() -> None:
    """Blocks of sent prompts are taken as held, as in PrefixRouter; 128 tokens for the other request cost less."""
    blocks = (1, 2, 3)
    workload = workload_of((0.0, 310, 2, blocks), (0.01, 310, 2, blocks), (0.02, 310, 2, (7, 8, 9)))
    report = simulate(workload, fleet_of(replicas=2, routing="prefix-aware"))
    assert report["cached_tokens"] == 300
    assert report["ttft_p99_s"] < 0.4, "the third prompt has a replica for itself"


def test_answers_take_room_until_they_are_evicted() -> None:
    workload = workload_of((0.0, 110, 1, (1,)), (1.0, 110, 500, (2,)), (30.0, 110, 1, (1,)))
    assert simulate(workload, fleet_of(capacity_tokens=800))["cached_tokens"] == 100
    assert simulate(workload, fleet_of(capacity_tokens=600))["cached_tokens"] == 0


def test_more_replicas_are_needed_for_more_load() -> None:
    requests = [(0.05 * i, 200, 4, ()) for i in range(200)]
    count, seen = replicas_needed(workload_of(*requests), fleet_of(), 0.5)
    assert count is not None
    by_size = {report["replicas"]: report for report in seen}
    assert by_size[count]["ttft_p99_s"] <= 0.5 < by_size[count - 1]["ttft_p99_s"]
    assert replicas_needed(workload_of(*requests), fleet_of(), 0.01, limit=8)[0] is None


def test_a_thousand_replicas() -> None:
    requests = [(0.01 * i, 300, 50, (i % 7, 100 + i)) for i in range(2000)]
    report = simulate(workload_of(*requests), fleet_of(replicas=1000, routing="prefix-aware"))
    assert report["requests"] == 2000
    assert math.isfinite(report["ttft_p99_s"])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prefill_token_s": 1}, "step_s is missing"),
        ({"step_s": 0, "prefill_token_s": 1}, "step_s must be a number above 0, got 0"),
        ({"step_s": 1, "prefill_token_s": True}, "prefill_token_s must be a number above 0"),
        ({"step_s": 1, "prefill_token_s": 1, "max_num_seqs": 1.5}, "max_num_seqs must be a whole number"),
        ({"step_s": 1, "prefill_token_s": 1, "load_s": -1}, "load_s must be a number from 0 on"),
        ({"step_s": 1, "prefill_token_s": 1, "spead": 1}, "'spead' is no cost; there are: step_s"),
    ],
)
def test_bad_costs(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read_costs(values)


def test_the_command(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 200 * i, "input_length": 1100 + 7 * i, "output_length": 20, "hash_ids": [i % 3, 10 + i % 6]}
        for i in range(40)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"formats": {name: vars(COSTS) for name in ("bf16", "int4")}}))
    picture = tmp_path / "fleet.png"
    words = ["plan", "llama-3.1-8b", "--memory", "24GiB", "--context", "8192", "--fleet", str(trace)]
    done = kvanta(
        *words, "--costs", str(costs), "--formats", "bf16", "int4", "--replicas", "1", "2", "--target-ttft", "3",
        "--plot", str(picture), "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["rows"]) == 2 * 2 * len(ROUTINGS)
    assert len(report["needed"]) == 2 * len(ROUTINGS)
    assert picture.stat().st_size > 10_000
    text = kvanta(*words, "--costs", str(costs), "--formats", "int4", "--replicas", "2").stdout
    assert "prefix-aware" in text
    for extra, reason in (
        ([], "--fleet needs --costs FILE"),
        (["--costs", str(costs), "--formats", "fp8"], "no costs of format 'fp8'"),
        (["--costs", str(costs), "--formats", "int4", "--replicas", "1001"], "replicas must be in 1..1000"),
        (["--costs", str(costs), "--formats", "int4", "--length-scale", "1000"], "the longest request has"),
    ):
        refused = kvanta(*words, *extra)
        assert refused.returncode == 2
        assert reason in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
