"""A replica: one engine as an actor of Ray Serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvanta import _core
from kvanta.errors import InputError
from kvanta.loaded_model import LoadedModel
from kvanta.ray.messages import EngineRequest, RemoteOutput, fields_of, set_fields, unpack_recipe
from kvanta.ray.prefix_index import PrefixIndex

_TAKEN_AT_ONCE = 64


class EngineReplica:
    """Its methods are called by fronts, by Serve's controller (health, statistics) and by nobody else."""

    def __init__(self, model: str, arguments: Mapping[str, Any], tokenizer: str | None = None) -> None:
        """`arguments`: EngineOptions and ModelOptions by name."""
        from ray import serve

        self._index = PrefixIndex()
        rank = serve.get_replica_context().rank.rank
        self._loaded = LoadedModel(model, arguments, tokenizer, on_kv_events=self._index, rank=rank)
        self._engine = self._loaded.engine
        self._outputs: dict[str, asyncio.Queue[_core.EngineOutput]] = {}
        self._count = 0
        asyncio.get_running_loop().add_reader(self._engine.start_queued(), self._deliver)

    def _deliver(self) -> None:
        for output in self._engine.take_news(_TAKEN_AT_ONCE):
            queue = self._outputs.get(output.id)
            if queue is not None:
                queue.put_nowait(output)

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[RemoteOutput]]:
        """The outputs of one request, as they come. A caller that goes away aborts it."""
        name = f"{self._count:x}-{request.name}"  # fronts choose the same names
        self._count += 1
        queue = self._outputs[name] = asyncio.Queue()
        finished = False
        try:
            try:
                self._add(name, request)
            except InputError as error:
                finished = True
                yield [RemoteOutput(request.name, finish=_core.FinishReason.ERROR, error=str(error))]
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

    def _add(self, name: str, request: EngineRequest) -> None:
        constraint = None
        if request.constraint:
            recipe = unpack_recipe(request.constraint, self._loaded.tokenizer)
            constraint = _core.TokenConstraint(recipe.matcher(self._loaded.tokenizer, self._loaded.grammars))
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
        )

    async def describe(self) -> dict[str, Any]:
        """The engine's configuration, with every "auto" resolved, its counters and its process."""
        return {"config": fields_of(self._engine.config), "engine": self._engine.stats(), "pid": os.getpid()}

    async def reset_prefix_cache(self) -> None:
        """Gives up every cached prefix that no running request uses."""
        await asyncio.to_thread(self._engine.reset_prefix_cache)

    def record_routing_stats(self) -> dict[str, Any]:
        """For PrefixRouter: the pages that the cache holds, and the engine's counters."""
        return {"pages": self._index.pages(), "engine": self._engine.stats()}

    def check_health(self) -> None:
        """Raises where the engine cannot be asked; Serve then replaces the replica."""
        self._engine.stats()

    def __del__(self) -> None:
        """Serve has waited for the requests (graceful_shutdown_timeout_s)."""
        if hasattr(self, "_engine"):
            self._engine.stop()
