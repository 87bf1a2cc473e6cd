"""Replicas, their front and the clients on one machine: threads that share CPUs."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvanta.fleet.costs import ReplicaCosts
from kvanta.fleet.replica import Replica, SimulatedRequest
from kvanta.loadgen.workload import PlannedRequest

REPLICA_WEIGHT = 36 / 1024
"""Weight of a replica's thread relative to a front's: Linux's weight of nice 15, as Ray's workers have, over nice 0."""


@dataclass(eq=False)
class Thread:
    """Work that one CPU does, in order."""

    weight: float = 1.0
    left_s: float = 0.0
    """Seconds left of the first work in the queue, on a dedicated CPU."""
    queue: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)


class SharedCpus:
    """Weighted processor sharing: each thread with work has its share of the CPUs, and at most one of them."""

    def __init__(self, cpus: float) -> None:
        self.now_s = 0.0
        self._cpus = cpus
        self._busy: list[Thread] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time_s: float, then: Callable[[], None]) -> None:
        """Calls `then` at that time."""
        heapq.heappush(self._timers, (time_s, next(self._count), then))

    def add(self, thread: Thread, seconds: float, then: Callable[[], None]) -> None:
        """Appends work of `seconds` to a thread's queue; calls `then` when it is done."""
        thread.queue.append((seconds, then))
        if len(thread.queue) == 1:
            thread.left_s = seconds
            self._busy.append(thread)

    def run(self) -> None:
        """Until there is no work left."""
        while self._busy or self._timers:
            rates = self._rates()
            ends = [thread.left_s / rate for thread, rate in rates]
            first = min(range(len(ends)), key=ends.__getitem__, default=-1)
            wait = ends[first] if ends else float("inf")
            due = bool(self._timers) and self._timers[0][0] <= self.now_s + wait
            if due:
                wait = max(0.0, self._timers[0][0] - self.now_s)
            self.now_s += wait
            for thread, rate in rates:
                thread.left_s = max(0.0, thread.left_s - wait * rate)
            if due:
                heapq.heappop(self._timers)[2]()
                continue
            thread = rates[first][0]
            _, then = thread.queue.popleft()
            if thread.queue:
                thread.left_s = thread.queue[0][0]
            else:
                self._busy.remove(thread)
            then()

    def _rates(self) -> list[tuple[Thread, float]]:
        """CPUs of each thread that has work."""
        free, total = self._cpus, sum(thread.weight for thread in self._busy)
        rates = []
        # A heavy thread runs on one CPU; its share beyond that is left to the lighter ones.
        for thread in sorted(self._busy, key=lambda each: -each.weight):
            rate = min(1.0, free * thread.weight / total)
            rates.append((thread, rate))
            free, total = free - rate, total - thread.weight
        return rates


class SharedFleet:
    """Requests from their arrival to their last token: front, the replica's messages, its engine, and back."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        route: Callable[[Sequence[Replica], PlannedRequest], int],
        costs: ReplicaCosts,
        cpus: float,
    ) -> None:
        self._replicas = replicas
        self._route = route
        self._costs = costs
        self._cpus = SharedCpus(cpus)
        self._client, self._front = Thread(), Thread()
        self._messages = [Thread(REPLICA_WEIGHT) for _ in replicas]
        self._engines = [Thread(REPLICA_WEIGHT) for _ in replicas]
        self._stepping = [False] * len(replicas)

    def run(self, requests: Sequence[SimulatedRequest]) -> None:
        """All of them, until the last one is finished."""
        sent = (self._client, self._costs.client_request_s), (self._front, self._costs.front_s)
        for request in requests:
            self._cpus.at(request.planned.arrival_s, partial(self._pass, sent, partial(self._send, request)))
        self._cpus.run()

    def _pass(self, stages: Sequence[tuple[Thread, float]], then: Callable[[], None]) -> None:
        """Work of one thread after the other."""
        if not stages:
            then()
            return
        thread, seconds = stages[0]
        self._cpus.add(thread, seconds, partial(self._pass, stages[1:], then))

    def _send(self, request: SimulatedRequest) -> None:
        index = self._route(self._replicas, request.planned)
        self._replicas[index].send(request)
        received = [(self._messages[index], self._costs.replica_request_s)]
        self._pass(received, partial(self._receive, index, request))

    def _receive(self, index: int, request: SimulatedRequest) -> None:
        self._replicas[index].receive(request)
        self._begin(index)

    def _begin(self, index: int) -> None:
        """Begins a step, if the replica has none and is not empty."""
        replica = self._replicas[index]
        if self._stepping[index] or not (replica.running or replica.waiting):
            return
        seconds = replica.begin_step(self._cpus.now_s)
        if seconds is None:
            self._cpus.at(replica.ready_s, partial(self._begin, index))
            return
        self._stepping[index] = True
        self._cpus.add(self._engines[index], seconds, partial(self._end, index))

    def _end(self, index: int) -> None:
        """Ends a step, whose tokens go to the clients."""
        costs = self._costs
        passed = (
            (self._messages[index], costs.message_s),
            (self._front, costs.front_message_s),
            (self._client, costs.client_message_s),
        )
        self._stepping[index] = False
        for request in self._replicas[index].end_step(self._cpus.now_s):
            first = request.decoded == 1
            self._pass(passed, partial(self._show, request) if first else _nothing)
        self._begin(index)

    def _show(self, request: SimulatedRequest) -> None:
        """The client has the first token."""
        request.first_token_s = self._cpus.now_s


def _nothing() -> None:
    """Is called when a later token has come."""
