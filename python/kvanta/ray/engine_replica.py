"""A replica: one engine as an actor of Ray Serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvanta import _core
from kvanta.calibration.automatic import add_query_matrices
from kvanta.engine.loaded_model import LoadedModel
from kvanta.errors import InputError
from kvanta.ray.autoscaling import CACHE_OCCUPANCY
from kvanta.ray.cluster_metrics import ClusterMetrics
from kvanta.ray.messages import (
    EngineRequest,
    OtherEngineError,
    RemoteOutput,
    fields_of,
    identity_of,
    set_fields,
    unpack_recipe,
)
from kvanta.ray.prefix_index import PrefixIndex

_TAKEN_AT_ONCE = 64


class EngineReplica:
    """Its methods are called by fronts, by Serve's controller (health, statistics) and by nobody else."""

    def __init__(
        self, model: str, arguments: Mapping[str, Any], tokenizer: str | None = None, first_rank: int = 0
    ) -> None:
        """`arguments`: EngineOptions and ModelOptions by name. `first_rank`: of the deployment's replicas, whose KV
        events are at the ports from it on.
        """
        from ray import serve

        self._index = PrefixIndex()
        rank = first_rank + serve.get_replica_context().rank.rank
        self._loaded = LoadedModel(
            model, arguments, tokenizer, add_matrices=add_query_matrices, on_kv_events=self._index, rank=rank
        )
        self._engine = self._loaded.engine
        self._settings = {"model": model, "arguments": dict(arguments)}
        self._identity = identity_of(self._engine)
        self._outputs: dict[str, asyncio.Queue[_core.EngineOutput]] = {}
        self._count = 0
        self._metrics = ClusterMetrics(self._loaded.name)
        asyncio.get_running_loop().add_reader(self._engine.start_with_queue(), self._deliver)

    def _deliver(self) -> None:
        for output in self._engine.pop_outputs(_TAKEN_AT_ONCE):
            queue = self._outputs.get(output.id)
            if queue is not None:
                queue.put_nowait(output)

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[RemoteOutput]]:
        """The outputs of one request, as they come. A caller that goes away aborts it. Raises OtherEngineError."""
        if request.identity != self._identity:
            raise OtherEngineError("the replica has another model, cache format or version than the front")
        name = f"{self._count:x}-{request.name}"  # fronts choose the same names
        self._count += 1
        queue = self._outputs[name] = asyncio.Queue()
        finished = False
        try:
            try:
                await self._add(name, request)
            except InputError as error:
                finished = True
                refused = _core.FinishReason.ERROR
                yield [RemoteOutput(request.name, finish=refused, error=str(error), invalid_input=True)]
                return
            while not finished:
                outputs = [await queue.get()]
                while not queue.empty():
                    outputs.append(queue.get_nowait())
                finished = outputs[-1].finish != _core.FinishReason.NONE
                copies = [RemoteOutput.of(each) for each in outputs]
                for each in copies:
                    each.id = request.name
                yield copies
        finally:
            del self._outputs[name]
            if not finished:
                self._engine.abort(name)

    async def _add(self, name: str, request: EngineRequest) -> None:
        constraint = None
        if request.constraint:  # a grammar may take seconds to compile; others go on
            constraint = await asyncio.to_thread(self._constraint, request.constraint)
        self._engine.add(
            name,
            request.prompt,
            set_fields(_core.SamplingParams(), request.sampling),
            request.cache_salt,
            request.priority,
            request.timeout_seconds,
            constraint,
            None if request.pooling is None else set_fields(_core.PoolingParams(), request.pooling),
            request.generated,
            request.user,
        )

    def _constraint(self, recipe: bytes) -> _core.TokenConstraint:
        tokenizer = self._loaded.tokenizer
        return _core.TokenConstraint(unpack_recipe(recipe, tokenizer).matcher(tokenizer, self._loaded.grammars))

    async def describe(self) -> dict[str, Any]:
        """The engine's configuration, with every "auto" resolved, its identity, counters and arguments."""
        config = fields_of(self._engine.config)
        return {"config": config, "identity": self._identity, "engine": self._engine.stats(), **self._settings}

    async def reset_prefix_cache(self) -> None:
        """Gives up every cached prefix that no running request uses."""
        await asyncio.to_thread(self._engine.reset_prefix_cache)

    def record_routing_stats(self) -> dict[str, Any]:
        """Statistics for PrefixRouter: the cache's pages and the engine's counters, which go to Ray's metrics, too."""
        stats = self._engine.stats()
        self._metrics.update(stats)
        return {"pages": self._index.pages(), "engine": stats, "identity": self._identity}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Statistics for ByRequestsAndCache."""
        stats = self._engine.stats()
        held = stats["cache_used_bytes"] - stats["cache_evictable_bytes"]
        return {CACHE_OCCUPANCY: held / stats["cache_budget_bytes"]}

    def check_health(self) -> None:
        """Raises where the engine cannot be asked; Serve then replaces the replica."""
        self._engine.stats()

    def __del__(self) -> None:
        """Serve has waited for the requests (graceful_shutdown_timeout_s)."""
        if hasattr(self, "_engine"):
            self._engine.stop()
