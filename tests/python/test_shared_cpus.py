"""Threads that share CPUs in the fleet simulator: times that can be told by hand."""

from __future__ import annotations

from functools import partial

import pytest
from test_fleet import BLOCK, COSTS, fleet_of, workload_of

from kvanta.fleet.costs import ReplicaCosts
from kvanta.fleet.shared_cpus import REPLICA_WEIGHT, SharedCpus, Thread
from kvanta.fleet.simulate import simulate


def ends(cpus: float, *work: tuple[float, Thread, float]) -> list[float]:
    """Times at which work ends; each: its begin, its thread, its seconds."""
    machine = SharedCpus(cpus)
    found = [0.0] * len(work)
    for index, (begin, thread, seconds) in enumerate(work):

        def end(index: int = index) -> None:
            found[index] = machine.now_s

        machine.at(begin, partial(machine.add, thread, seconds, end))
    machine.run()
    return found


def test_threads_share_evenly_and_a_thread_uses_one_cpu() -> None:
    assert ends(1, (0, Thread(), 1.0), (0, Thread(), 2.0)) == pytest.approx([2.0, 3.0])
    assert ends(2, (0, Thread(), 1.0), (0, Thread(), 2.0)) == pytest.approx([1.0, 2.0])
    assert ends(2, *[(0, Thread(), 1.0) for _ in range(3)]) == pytest.approx([1.5, 1.5, 1.5])
    assert ends(1.5, (0, Thread(), 1.0), (0, Thread(), 1.0)) == pytest.approx([4 / 3, 4 / 3])


def test_work_that_comes_slows_what_runs() -> None:
    assert ends(1, (0, Thread(), 0.1), (0.05, Thread(), 0.1)) == pytest.approx([0.15, 0.2])
    assert ends(1, (0, Thread(), 0.1), (0.3, Thread(), 0.1)) == pytest.approx([0.1, 0.4])


def test_a_thread_works_in_order() -> None:
    thread = Thread()
    assert ends(2, (0, thread, 0.1), (0, thread, 0.2), (0, thread, 0.0)) == pytest.approx([0.1, 0.3, 0.3])


def test_weights_divide_the_cpus_and_nothing_is_left_idle() -> None:
    light = [(0.0, Thread(0.1), 1.0) for _ in range(2)]
    assert ends(1, (0, Thread(), 1.0), *light) == pytest.approx([1.2, 3.0, 3.0])
    assert ends(2, (0, Thread(), 1.0), *light) == pytest.approx([1.0, 1.5, 1.5])


def test_a_token_passes_all_threads() -> None:
    work = {"client_request_s": 0.001, "front_s": 0.002, "replica_request_s": 0.004}
    work |= {"message_s": 0.008, "front_message_s": 0.016, "client_message_s": 0.032}
    costs = ReplicaCosts(**{**vars(COSTS), **work, "request_s": 0.5})
    report = simulate(workload_of((0.0, 100, 1, ())), fleet_of(costs=costs, cpus=4))
    assert report["ttft_p50_s"] == pytest.approx(0.007 + 0.1 + 0.056 + 0.5)
    burst = simulate(workload_of(*[(0.0, 100, 1, ())] * 3), fleet_of(replicas=3, costs=costs, cpus=100))
    assert burst["ttft_p99_s"] - report["ttft_p50_s"] == pytest.approx(2 * 0.032), "clients read one after the other"


def test_the_front_goes_before_steps() -> None:
    """On one CPU, the second request passes the front almost as if the first one's step were not there."""
    costs = ReplicaCosts(**{**vars(COSTS), "front_s": 0.1})
    two = workload_of((0.0, 100, 1, ()), (0.1, 100, 1, ()))
    report = simulate(two, fleet_of(replicas=2, costs=costs, cpus=1))
    passed = 0.1 + 0.1 * (1 + REPLICA_WEIGHT)
    first = passed + 2 * 0.1 * (1 - REPLICA_WEIGHT)  # the replicas share what is left
    assert report["ttft_p99_s"] == pytest.approx(first)
    assert report["ttft_p50_s"] == pytest.approx(0.3)


def test_shared_replicas_find_what_they_hold() -> None:
    blocks = (1, 2, 3)
    turns = [(0.0, 3 * BLOCK + 10, 4, blocks), (5.0, 3 * BLOCK + 10, 4, blocks), (5.0, 3 * BLOCK + 10, 4, (7, 8, 9))]
    for cpus in (None, 2):
        report = simulate(workload_of(*turns), fleet_of(replicas=2, routing="prefix-aware", cpus=cpus))
        assert report["cached_tokens"] == 3 * BLOCK


def test_pages_are_loaded_while_cpus_are_shared() -> None:
    workload = workload_of((0.0, 310, 2, (1, 2, 3)), (10.0, 310, 2, (1, 2, 3)))
    report = simulate(workload, fleet_of(replicas=2, routing="shared-store", cpus=2))
    assert report["loaded_tokens"] == 300
    assert report["ttft_p50_s"] == pytest.approx(300 * 1000 / 1e9 + 0.01, rel=1e-3)
