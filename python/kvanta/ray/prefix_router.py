"""Request routers of the replicas: a prompt goes where it begins first, by the pages that they hold and their load."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvanta.fleet.simulate import BACKLOG_WEIGHT, TOKENS_PER_REQUEST
from kvanta.ray import prompt_backlog, replica_stats
from kvanta.ray.messages import EngineRequest
from kvanta.ray.prefix_index import ReplicaPages, page_hashes

_MAX_SLOWNESS = 4.0
"""Bound of a replica's time per prompt token, in those of the median, and of the inverse. Machines differ by less; what
is predicted from a few short prompts, on a busy machine, may be a hundred times wrong.
"""


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Costs a replica the time that it would compute before the prompt's first token, and takes the least.

    That is the part of the prompt that it does not hold, a quarter of such parts of the prompts before it (whose first
    token has not come), and `tokens_per_request` for each of its requests: tokens, times what a token takes there.
    """

    def initialize_state(self, *, page_size: int = 64, tokens_per_request: int = TOKENS_PER_REQUEST) -> None:
        """request_router_kwargs. `page_size`: of the replicas' caches."""
        self._page_size = page_size
        self._tokens_per_request = tokens_per_request
        self._pages: dict[ReplicaID, ReplicaPages] = {}
        self._identities: dict[ReplicaID, str] = {}
        self._token_seconds: dict[ReplicaID, float] = {}
        # Requests that Ray has not counted out, by its names: ours, and the replica once they are there.
        self._requests: dict[str, tuple[str, ReplicaID | None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Reads what the replicas have reported (record_routing_stats)."""
        super().update_replicas(replicas)
        known = {each.replica_id: each for each in replicas}
        self._pages = {replica: self._pages.get(replica) or ReplicaPages() for replica in known}
        self._identities, self._token_seconds = {}, {}
        for replica, running in known.items():
            stats = running.routing_stats or {}
            if "identity" in stats:
                self._identities[replica] = stats["identity"]
            self._pages[replica].report(stats.get("pages", b""))
            if "engine" in stats:
                self._latest[replica.unique_id] = stats["engine"]
                self._token_seconds[replica] = stats["engine"].get("prompt_token_seconds") or 0.0
        self.forget_unsent()
        for gone in self._latest.keys() - {replica.unique_id for replica in known}:
            del self._latest[gone]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets the replica, even before Serve's controller has noticed."""
        super().on_replica_actor_died(replica_id)
        self._latest.pop(replica_id.unique_id, None)

    @property
    def _latest(self) -> dict[str, dict[str, Any]]:
        return replica_stats.LATEST.setdefault(self._deployment_id.name, {})

    def _equal(self, replicas: list[RunningReplica], request: EngineRequest) -> list[RunningReplica]:
        """Replicas with the request's model, format and version, and those that have not reported yet; else all: one
        refuses the request.
        """
        known = self._identities
        return [
            each for each in replicas if known.get(each.replica_id, request.identity) == request.identity
        ] or replicas

    def _candidates(
        self, replicas: list[RunningReplica], pending_request: PendingRequest | None
    ) -> tuple[list[RunningReplica], EngineRequest | None]:
        """Replicas for what is pending, and the request if it is one. Serve waits a little while all are full."""
        if pending_request is None:
            return replicas, None
        pending_request.routing_context.should_backoff = True
        request = _request_of(pending_request)
        return (replicas if request is None else self._equal(replicas, request)), request

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas by their costs, of equal ones the emptier first; one that is full is passed over."""
        hashes: list[bytes] = []
        tokens = 0
        candidates, request = self._candidates(candidate_replicas, pending_request)
        if request is not None:
            prompt = request.prompt + request.generated
            hashes, tokens = list(page_hashes(prompt, self._page_size, request.cache_salt)), len(prompt)
            assert pending_request is not None
            self._requests[pending_request.metadata.internal_request_id] = request.name, None

        pages = {each.replica_id: self._pages.get(each.replica_id) or ReplicaPages() for each in candidates}
        lacks = {replica: tokens - held.matched(hashes) * self._page_size for replica, held in pages.items()}

        slowness, ended = self._slowness(candidates), self._ended()

        def cost(candidate: RunningReplica) -> tuple[float, int]:
            replica = candidate.replica_id
            running = max(0, (self.replica_queue_len_cache.get(replica) or 0) - ended[replica])
            before = BACKLOG_WEIGHT * prompt_backlog.of(replica) + running * self._tokens_per_request
            return slowness[replica] * (lacks[replica] + before), pages[replica].count

        ranked = sorted(candidates, key=cost)
        if ranked and request is not None:
            prompt_backlog.expect(request.name, ranked[0].replica_id, lacks)
        if ranked and ranked[0].replica_id in self._pages:
            self._pages[ranked[0].replica_id].send(hashes)
        return [[replica] for replica in ranked]

    def _slowness(self, candidates: list[RunningReplica]) -> dict[ReplicaID, float]:
        """Time of a prompt's token in each replica, in those of the median, within bounds; 1 where it is not known."""
        seconds = {each.replica_id: self._token_seconds.get(each.replica_id) or 0.0 for each in candidates}
        median = statistics.median([each for each in seconds.values() if each] or [1.0])
        return {
            replica: min(max((each or median) / median, 1 / _MAX_SLOWNESS), _MAX_SLOWNESS)
            for replica, each in seconds.items()
        }

    def _ended(self) -> Counter[ReplicaID]:
        """Requests whose last tokens have come, and which Ray still counts: it does for a while on a busy machine, and
        the next turn of the same conversation comes at once.
        """
        return Counter(
            replica
            for request, replica in self._requests.values()
            if replica is not None and not prompt_backlog.is_unfinished(request)
        )

    def forget_unsent(self) -> None:
        """Forgets requests whose clients went away while they waited for a replica."""
        for name, (request, replica) in list(self._requests.items()):
            if replica is None and not prompt_backlog.is_unfinished(request):
                del self._requests[name]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """The first choice may have been full."""
        super().on_request_routed(pending_request, replica_id, result)
        request = _request_of(pending_request)
        if request is not None:
            prompt_backlog.move(request.name, replica_id)
            name = pending_request.metadata.internal_request_id
            if name in self._requests:
                self._requests[name] = request.name, replica_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray has noticed that a request is over, and counts it out next."""
        super().on_request_completed(replica_id, internal_request_id)
        self._requests.pop(internal_request_id, None)


def _request_of(pending_request: PendingRequest) -> EngineRequest | None:
    return next((each for each in pending_request.args if isinstance(each, EngineRequest)), None)


class RoundRobinRouter(PrefixRouter):
    """Takes the replicas in turn, whatever they hold: for replicas that share a store, and to compare with."""

    def initialize_state(self, **kwargs: int) -> None:
        """Does the same as PrefixRouter's."""
        super().initialize_state(**kwargs)
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The next replica, and those after it in case that it is full."""
        candidates, _ = self._candidates(candidate_replicas, pending_request)
        replicas = sorted(candidates, key=lambda replica: replica.replica_id.unique_id)
        first = self._turn % max(1, len(replicas))
        self._turn += 1
        return [[replica] for replica in replicas[first:] + replicas[:first]]


ROUTERS: dict[str, type[PrefixRouter]] = {"prefix-aware": PrefixRouter, "round-robin": RoundRobinRouter}
"""Routers by the names of kvanta.server.options.ROUTINGS."""
