"""An engine whose requests run on replicas. The server uses it like a local engine.

A request whose replica dies goes on at another one: with the tokens that have come, and so with the same bits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import ray.exceptions
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from kvanta import _core
from kvanta.ray import prompt_backlog, replica_stats
from kvanta.ray.merged_stats import merged_stats
from kvanta.ray.messages import EngineRequest, OtherEngineError, RemoteOutput, fields_of, prompt_of, set_fields

_log = logging.getLogger("kvanta.server")
_NO_PREFILL_SECONDS = 2.0
"""Wait for a prefill replica before a request continues without one; replicas that start have reported by then."""
_OTHER_ENGINE_SECONDS = 10.0
"""Wait while only replicas of other models run, until a request fails; new ones report within a second."""
_RETRY_SECONDS = 0.1
"""Between two attempts of a request."""
LOST = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, DeploymentUnavailableError, BackPressureError)
"""The replica, or the way to it, is gone; another attempt may succeed."""


def _latest(handle: DeploymentHandle) -> list[dict[str, Any]]:
    """Counters of a deployment's replicas that have reported."""
    return list(replica_stats.LATEST.get(handle.deployment_name, {}).values())


class ReplicatedEngine:
    """The methods of _core.Engine that the server calls. `start_with_queue` is called on the event loop's thread."""

    def __init__(
        self,
        handle: DeploymentHandle,
        description: dict[str, Any],
        info: _core.ModelInfo,
        *,
        replicas: int,
        prefill: DeploymentHandle | None = None,
        give_up: float = 120.0,
    ) -> None:
        """`description`: of one of at most `replicas` replicas. `prefill`: replicas that compute prompts for these.

        `give_up`: seconds without a replica that answers, after which a request fails.
        """
        self.info = info
        self.config: _core.EngineConfig = set_fields(_core.EngineConfig(), description["config"])
        if self.config.max_queued_requests:
            one = self.config.max_num_seqs + self.config.max_queued_requests
            self.config.max_queued_requests = replicas * one - self.config.max_num_seqs
        self._handle = handle
        self._prefill = prefill
        self._stats = description["engine"]
        self._identity = description["identity"]
        self._give_up = give_up
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs: deque[RemoteOutput] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signalled = False
        self._lock = threading.Lock()
        self._requests: dict[str, concurrent.futures.Future[None]] = {}
        self.moved = 0
        """Requests that went on at another replica."""

    def start_with_queue(self) -> int:
        """A descriptor that is readable while pop_outputs has outputs."""
        self._loop = asyncio.get_running_loop()
        return self._ready

    def pop_outputs(self, limit: int) -> list[RemoteOutput]:
        """The oldest outputs."""
        outputs = [self._outputs.popleft() for _ in range(min(limit, len(self._outputs)))]
        if not self._outputs and self._signalled:
            self._signalled = False
            os.eventfd_read(self._ready)
        return outputs

    def add(
        self,
        name: str,
        prompt: list[int],
        sampling: _core.SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
        timeout_seconds: float = 0.0,
        constraint: bytes | None = None,
        pooling: _core.PoolingParams | None = None,
        user: str = "",
    ) -> None:
        """Queues a request; from any thread. Raises InputError for bad parameters."""
        sampling.validate(int(self.info.vocab))
        request = EngineRequest(
            name,
            prompt,
            fields_of(sampling),
            cache_salt,
            priority,
            timeout_seconds,
            constraint or b"",
            None if pooling is None else fields_of(pooling),
            identity=self._identity,
            user=user,
        )
        assert self._loop is not None
        with self._lock:
            self._requests[name] = asyncio.run_coroutine_threadsafe(self._run(request), self._loop)

    def abort(self, name: str) -> None:
        """Ends a request; its pages are freed where it runs."""
        with self._lock:
            running = self._requests.pop(name, None)
        if running is not None:
            running.cancel()

    def stop(self, _drain: bool = False) -> None:
        """Ends what runs."""
        for name in list(self._requests):
            self.abort(name)

    def reset_prefix_cache(self) -> None:
        """Empties every replica's. Off the event loop."""
        for handle in (self._handle, self._prefill):
            if handle is not None:
                handle.broadcast("reset_prefix_cache").results(timeout_s=60)

    def stats(self) -> dict[str, Any]:
        """Statistics of the replicas as far as they have reported them, as of one engine."""
        latest = _latest(self._handle)
        total = merged_stats(latest or [self._stats], [] if self._prefill is None else _latest(self._prefill))
        return {**total, "moved": self.moved, "replicas": len(latest)}

    async def _run(self, request: EngineRequest) -> None:
        begin = time.monotonic()
        last, reason = begin, "the stream ended"
        limit = request.timeout_seconds
        try:
            if self._prefill is not None:
                await self._compute_prompt(request)
                last = time.monotonic()
                if limit:
                    request.timeout_seconds = max(0.001, limit - (last - begin))
            while True:
                prompt_backlog.begin(request.name)
                response = self._handle.options(stream=True).generate.remote(request)
                try:
                    async for outputs in response:
                        last = time.monotonic()
                        if self._take(request, outputs):
                            return
                except LOST as error:
                    reason = type(error).__name__
                except OtherEngineError as error:
                    reason = str(error)
                    if time.monotonic() - last > _OTHER_ENGINE_SECONDS:
                        self._end(request, _core.FinishReason.ERROR, reason)
                        return
                finally:
                    response.cancel()  # of a client that has gone: the replica frees its pages
                now = time.monotonic()
                if limit and now - begin > limit:
                    self._end(request, _core.FinishReason.TIMEOUT, f"not finished within {limit:g} s")
                    return
                if now - last > self._give_up:
                    self._end(request, _core.FinishReason.ERROR, f"no replica answers: {reason}")
                    return
                _log.warning("%s: %d tokens have come, another replica goes on", reason, len(request.generated))
                self.moved += 1
                if limit:
                    request.timeout_seconds = max(0.001, limit - (now - begin))
                await asyncio.sleep(_RETRY_SECONDS)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a defect of the replica or of Kvanta
            _log.exception("request %s", request.name)
            self._end(request, _core.FinishReason.ERROR, f"{type(error).__name__} at the replica")
        finally:
            prompt_backlog.end(request.name)
            with self._lock:
                self._requests.pop(request.name, None)

    async def _compute_prompt(self, request: EngineRequest) -> None:
        """Has a prefill replica compute the prompt and store its pages. Where that fails, the others compute it."""
        assert self._prefill is not None
        whole = request.sampling["prompt_logprobs"] >= 0 or request.sampling["skip_reading_prefix_cache"]
        if request.pooling is not None or whole or len(request.prompt) <= self.config.page_size:
            return
        prompt_backlog.begin(request.name)
        response = self._prefill.options(stream=True).generate.remote(prompt_of(request))

        async def finish() -> None:
            async for _ in response:
                pass

        task = asyncio.ensure_future(finish())
        alone = 0.0
        try:
            while not task.done() and alone < _NO_PREFILL_SECONDS:
                await asyncio.wait({task}, timeout=_RETRY_SECONDS)
                alone = 0.0 if _latest(self._prefill) else alone + _RETRY_SECONDS
            if not task.done():
                _log.warning("no prefill replica: the prompt is computed where its tokens are generated")
            elif (error := task.exception()) is not None:
                _log.warning("%s: a prompt is computed where its tokens are generated", type(error).__name__)
        finally:
            prompt_backlog.forget(request.name)
            task.cancel()
            response.cancel()

    def _take(self, request: EngineRequest, outputs: list[RemoteOutput]) -> bool:
        """True when there is no more to come."""
        finished = outputs[-1].finish != _core.FinishReason.NONE
        (prompt_backlog.end if finished else prompt_backlog.forget)(request.name)
        for each in outputs:
            if request.generated:
                each.cached_tokens = 0 if not each.tokens else min(each.cached_tokens, len(request.prompt))
            request.generated += each.tokens
            self._put(each)
        return finished

    def _end(self, request: EngineRequest, finish: _core.FinishReason, error: str) -> None:
        self._put(RemoteOutput(request.name, finish=finish, error=error))

    def _put(self, output: RemoteOutput) -> None:
        self._outputs.append(output)
        if not self._signalled:
            self._signalled = True
            os.eventfd_write(self._ready, 1)
