"""The simulation of a fleet: a workload's requests, routed to replicas."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.fleet.cache import BlockCache
from kvanta.fleet.costs import ReplicaCosts
from kvanta.fleet.replica import Replica, SharedStore, SimulatedRequest
from kvanta.fleet.shared_cpus import SharedFleet
from kvanta.loadgen.workload import PlannedRequest, Workload

MAX_REPLICAS = 1000
TOKENS_PER_REQUEST = 128
"""Cost of a request to the prefix-aware router, in addition to the prompt tokens that a replica has to compute."""
BACKLOG_WEIGHT = 0.25
"""Weight of prompt tokens that a replica has to compute for earlier requests. On Mooncake's conversations, full weight
loses a sixth of the cached tokens and gains nothing; zero doubles the time to the first token.
"""


@dataclass(frozen=True)
class Fleet:
    """Replicas of one kind, and how requests come to them."""

    replicas: int
    routing: str
    capacity_tokens: int
    """Tokens that a replica's cache holds."""
    bytes_per_token: float
    costs: ReplicaCosts
    store_bytes: float = math.inf
    """Size of the shared store."""
    cpus: float | None = None
    """CPUs that the replicas share with the front, each of which can use one; None: each has its own."""


class _RoundRobin:
    def __init__(self) -> None:
        self._next = -1

    def __call__(self, replicas: Sequence[Replica], _request: PlannedRequest) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


def _prefix_aware(replicas: Sequence[Replica], request: PlannedRequest) -> int:
    """PrefixRouter's choice: least to compute before the first token; among equals, the smallest cache."""

    def cost(index: int) -> tuple[float, int]:
        replica = replicas[index]
        before = BACKLOG_WEIGHT * replica.backlog_tokens + replica.requests * TOKENS_PER_REQUEST
        return replica.missing(request) + before, len(replica.cache)

    return min(range(len(replicas)), key=cost)


# Router of a routing, and true where replicas share a store.
ROUTINGS: dict[str, tuple[Callable[[], Callable[[Sequence[Replica], PlannedRequest], int]], bool]] = {
    "round-robin": (_RoundRobin, False),
    "prefix-aware": (lambda: _prefix_aware, False),
    "shared-store": (_RoundRobin, True),
}


def _percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; `values` are sorted."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def simulate(workload: Workload, fleet: Fleet) -> dict[str, Any]:
    """Figures of one fleet. Raises InputError for a fleet that cannot be."""
    if not 1 <= fleet.replicas <= MAX_REPLICAS:
        raise InputError(f"replicas must be in 1..{MAX_REPLICAS}, got {fleet.replicas}")
    if fleet.cpus is not None and not 0 < fleet.cpus < math.inf:
        raise InputError(f"cpus must be above 0, got {fleet.cpus:g}")
    if fleet.routing not in ROUTINGS:
        raise InputError(f"routing {fleet.routing!r} is unknown; there are: {', '.join(ROUTINGS)}")
    make_router, shares = ROUTINGS[fleet.routing]
    route = make_router()
    size = max((request.block_tokens for request in workload.requests), default=0) or 1
    store = None
    if shares:
        blocks = fleet.store_bytes / fleet.bytes_per_token / size
        store = SharedStore(int(min(blocks, 2**62)), fleet.bytes_per_token)
    # On shared CPUs, messages are other threads' work than steps.
    costs = fleet.costs if fleet.cpus is None else dataclasses.replace(fleet.costs, message_s=0.0)
    replicas = [
        Replica(costs, BlockCache(fleet.capacity_tokens // size), fleet.capacity_tokens, store)
        for _ in range(fleet.replicas)
    ]
    requests = [SimulatedRequest(planned) for planned in workload.requests]
    if fleet.cpus is None:
        _run_apart(replicas, requests, route, fleet.costs)
    else:
        SharedFleet(replicas, route, fleet.costs, fleet.cpus).run(requests)
    return _report(fleet, requests)


def _run_apart(
    replicas: Sequence[Replica],
    requests: Sequence[SimulatedRequest],
    route: Callable[[Sequence[Replica], PlannedRequest], int],
    costs: ReplicaCosts,
) -> None:
    """Replicas with a CPU each, whose messages delay their steps."""
    front_s = 0.0  # when the front is free
    for request in requests:
        front_s = max(front_s, request.planned.arrival_s) + costs.front_s
        for replica in replicas:
            replica.run_until(front_s)
        replicas[route(replicas, request.planned)].enqueue(request, front_s)
    for replica in replicas:
        replica.run_until(math.inf)


def _report(fleet: Fleet, requests: Sequence[SimulatedRequest]) -> dict[str, Any]:
    times = sorted(request.ttft_s + fleet.costs.request_s for request in requests)
    prompt = sum(request.planned.input_tokens for request in requests)
    cached = sum(request.cached_tokens for request in requests)
    finished = max(request.finished_s for request in requests)
    return {
        "replicas": fleet.replicas,
        "routing": fleet.routing,
        "requests": len(requests),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "loaded_tokens": sum(request.loaded_tokens for request in requests),
        "hit_rate": cached / prompt,
        "ttft_mean_s": sum(times) / len(times),
        "ttft_p50_s": _percentile(times, 0.5),
        "ttft_p99_s": _percentile(times, 0.99),
        "seconds": finished,
        "output_tokens_per_s": sum(request.planned.output_tokens for request in requests) / finished,
    }


def replicas_needed(
    workload: Workload, fleet: Fleet, target_s: float, limit: int = MAX_REPLICAS
) -> tuple[int | None, list[dict[str, Any]]]:
    """Fewest replicas whose 99th percentile of the time to the first token is at most `target_s`.

    None if `limit` do not suffice. Also the reports of the fleets that were simulated, by size.
    """
    seen: dict[int, dict[str, Any]] = {}

    def suffices(count: int) -> bool:
        seen[count] = simulate(workload, Fleet(**{**vars(fleet), "replicas": count}))
        return bool(seen[count]["ttft_p99_s"] <= target_s)

    high = 1
    while not suffices(high):
        if high >= limit:
            return None, [seen[count] for count in sorted(seen)]
        high = min(2 * high, limit)
    low = high // 2  # too few, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high, [seen[count] for count in sorted(seen)]
