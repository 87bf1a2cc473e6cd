"""The engine for an event loop, which reads the outputs of its steps like data of a connection and detokenizes them."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvanta import _core
from kvanta.constraints.structured_output import TextShape
from kvanta.engine.embedding import Embedding
from kvanta.engine.generation import Generation
from kvanta.engine.loaded_model import LoadedModel
from kvanta.errors import QueueFullError
from kvanta.params.pooling_params import PoolingParams
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.http.errors import ApiError, shutting_down
from kvanta.server.http.time_slices import SLICE_SECONDS
from kvanta.server.jobs.embedding_job import EmbeddingJob
from kvanta.server.jobs.engine_job import EngineJob
from kvanta.server.jobs.generation_job import GenerationJob
from kvanta.server.jobs.metrics import Metrics
from kvanta.text.prompts import TokenPrompt

Result = TypeVar("Result")

_FINISHES_REMEMBERED = 64
_MAX_OUTPUTS = 256
"""Outputs taken in one iteration of the event loop, so that other tasks run in between."""
_OUTPUTS_AT_ONCE = 16
"""Outputs taken between two looks at the clock: those with many log-probabilities take longer."""
_GRAMMAR_SECONDS = 10.0
"""Longest time that a request waits for its grammar."""
_ADDED_AT_ONCE = 2**15
"""Prompt tokens, over all texts, that are handed to the engine on the event loop itself."""
_SEQUENCES_AT_ONCE = 16
_STOP_CHARACTERS_AT_ONCE = 2048


class AsyncLLM:
    """Requests to one engine from one event loop. Every method is called on the loop's thread.

    Capacity is the engine's max_num_seqs plus max_queued_requests sequences; more are refused with 429.
    `time_limit`: seconds from a request's submission to its end; 0: none.
    """

    def __init__(self, loaded: LoadedModel, *, time_limit: float = 0.0) -> None:
        self.loaded = loaded
        self.tokenizer = loaded.tokenizer
        config = loaded.engine.config
        self.max_model_len = int(config.max_model_len)
        self.max_cache_ttl = float(config.max_cache_ttl)
        self.capacity = config.max_num_seqs + config.max_queued_requests if config.max_queued_requests else sys.maxsize
        cache = {
            "block_size": config.page_size,
            "cache_dtype": loaded.stats()["kv_cache_dtype"],
            "enable_prefix_caching": config.enable_prefix_caching,
            "kv_cache_memory_bytes": loaded.stats()["cache_budget_bytes"],
            "num_gpu_blocks": loaded.summary().all_tokens // config.page_size,
        }
        self.metrics = Metrics(loaded.name, loaded.stats, cache)
        self.draining = False
        self._time_limit = time_limit
        self._admitted = 0
        self.open_requests = 0
        """Admitted requests that the engine has not finished."""
        self._jobs: dict[str, EngineJob] = {}  # by the engine's request id
        self._count = 0
        self._seeds = random.Random(config.seed)
        self._finishes: deque[float] = deque(maxlen=_FINISHES_REMEMBERED)
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="kvanta-tokenizer")
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="kvanta-grammars")
        self._compilers.submit(loaded.grammars.prepare)
        self.grammar_seconds = _GRAMMAR_SECONDS
        self._writers = ThreadPoolExecutor(2, thread_name_prefix="kvanta-answers")
        self.writing = 0
        """Answers that these threads are writing, or are about to."""

    def start(self) -> None:
        """Starts the engine's thread; the running event loop receives its outputs."""
        self._descriptor = self.loaded.engine.start_with_queue()
        asyncio.get_running_loop().add_reader(self._descriptor, self._deliver)

    async def stop(self) -> None:
        """Waits for the step in progress. What still runs is aborted."""
        self.draining = True
        self.abort_all()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._workers, self.loaded.engine.stop)
        loop.remove_reader(self._descriptor)
        self._workers.shutdown(wait=False)
        self._writers.shutdown(wait=False)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def admit(self, sequences: int) -> Callable[[], None]:
        """Reserves capacity for `sequences`; the returned function releases it.

        Raises ApiError: 429 when the queue is full, 503 when the server shuts down.
        """
        if self.draining:
            raise shutting_down()
        if sequences > self.capacity:
            message = f"the request needs {sequences} texts; this server takes {self.capacity} at once"
            raise ApiError(400, message, param="n")
        if self._admitted + sequences > self.capacity:
            taken = f"{self._admitted} of {self.capacity} sequences"
            raise self._queue_full(f"the queue is full: {taken}, {sequences} more do not fit", sequences)
        self._admitted += sequences
        self.open_requests += 1
        held = [sequences]

        def give_back() -> None:
            if held:
                self._admitted -= held.pop()
                self.open_requests -= 1

        return give_back

    async def off_loop(self, function: Callable[[], Result]) -> Result:
        """Runs a slow function, such as tokenizing, on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, contextvars.copy_context().run, function)

    async def _compile(self, field: str, make: Callable[[], Result]) -> Result:
        """Runs what compiles the grammar of a field, on threads that do nothing else: prompts of others do not wait.

        Raises ApiError when it takes too long. Nothing can stop it, but the next request for it may find it finished.
        """
        compiling = self._compilers.submit(make)
        result = asyncio.wrap_future(compiling)
        result.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody else reads it
        try:
            return await asyncio.wait_for(asyncio.shield(result), self.grammar_seconds)
        except TimeoutError:
            if compiling.cancel():  # it had not begun
                message = "too many other grammars are being compiled"
                raise ApiError(503, message, headers={"Retry-After": "10"}) from None
            message = f"{field}: compiling the grammar took more than {self.grammar_seconds:g} s"
            raise ApiError(400, message, param=field) from None

    async def write(self, build: Callable[[], Result]) -> Result:
        """Runs `build`, which makes a large answer of the engine's outputs, on a thread for such answers."""
        self.writing += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._writers, build)
        finally:
            self.writing -= 1

    async def submit(
        self,
        encode: Callable[[], Sequence[TokenPrompt]],
        params: SamplingParams,
        done: Callable[[], None],
        *,
        arrival: float,
        at_once: bool = False,
        cache_salt: str = "",
        priority: int = 0,
        user: str = "",
        shape: TextShape | None = None,
    ) -> GenerationJob:
        """Queues the `n` texts of every prompt that `encode` makes. When it raises, nothing is queued.

        `encode` runs on another thread, unless it is done `at_once`; so does compiling a grammar. `done` is called when
        the engine has no more of the texts. `arrival`: time.perf_counter() when the request came.
        `shape`: parts of the texts that a parser tells apart.
        """
        name = f"{self._count:x}"
        self._count += 1
        params.flat_logprobs = True  # few objects for the collector of garbage

        prompts: list[TokenPrompt] = []

        def make() -> list[Generation]:
            return [
                Generation(
                    f"{name}.{index}",
                    prompt,
                    params,
                    self.tokenizer,
                    self.loaded.grammars,
                    shape,
                    defer_prompt_logprobs=True,
                )
                for index, prompt in enumerate(prompts)
            ]

        stop_characters = sum(map(len, params.stop_strings))
        quick = at_once and not params.bad_words and stop_characters <= _STOP_CHARACTERS_AT_ONCE
        prompts += encode() if at_once else await self.off_loop(encode)
        if params.structured_outputs is not None or params.stop_regex:
            field = "stop_regex" if params.structured_outputs is None else "structured_outputs"
            generations = await self._compile(field, make)
        else:
            generations = make() if quick and params.n <= _SEQUENCES_AT_ONCE else await self.off_loop(make)
        engine = self.loaded.engine
        job = GenerationJob(generations, self._ended, engine.abort, done, arrival)

        def add() -> None:
            for generation in generations:
                generation.add_to(engine, self._seeds, cache_salt, priority, self._time_limit, user)

        for _ in generations:
            self.metrics.observe_params(params)
        tokens = sum(len(each.output.prompt_token_ids) * len(each.completions) for each in generations)
        await self._queue(job, add, tokens)
        return job

    async def submit_embeddings(
        self,
        prompts: Sequence[TokenPrompt],
        params: PoolingParams,
        *,
        arrival: float,
        cache_salt: str = "",
        priority: int = 0,
        user: str = "",
    ) -> EmbeddingJob:
        """Queues prompts whose hidden states are pooled. When it raises, nothing is queued.

        ApiError 504: the time limit has passed.

        `params`: without None for what has a default. `arrival`: time.perf_counter() when the request came.
        """
        name = f"{self._count:x}"
        self._count += 1
        engine = self.loaded.engine
        embeddings = [Embedding(f"{name}.{index}", prompt, params) for index, prompt in enumerate(prompts)]
        job = EmbeddingJob(embeddings, self._ended, engine.abort, arrival)
        limit = self._time_limit and self._time_limit - (time.perf_counter() - arrival)
        if limit < 0:  # earlier portions have taken it
            raise ApiError(504, f"not finished within {self._time_limit:g} s", code="request_timeout")

        def add() -> None:
            for embedding in embeddings:
                embedding.add_to(engine, cache_salt, priority, limit, user)

        await self._queue(job, add, sum(len(prompt.token_ids) for prompt in prompts))
        return job

    async def _queue(self, job: EngineJob, add: Callable[[], None], tokens: int) -> None:
        """Queues a job's sequences, which have `tokens` prompt tokens. When it raises, nothing is queued."""
        names, sequences = list(job.open), len(job.open)
        self._jobs.update(dict.fromkeys(names, job))  # first: outputs may come before the last one is added

        def end_late() -> None:
            """Aborts what was added after it had ended, which the engine could not end yet."""
            for name in names:
                if name not in job.open:
                    self.loaded.engine.abort(name)

        try:
            if tokens <= _ADDED_AT_ONCE and sequences <= _SEQUENCES_AT_ONCE:
                add()
            else:
                adding = asyncio.get_running_loop().run_in_executor(self._workers, add)
                adding.add_done_callback(lambda _: end_late())
                await asyncio.shield(adding)  # it goes on when this is cancelled
        except BaseException as error:
            for request in job.open:
                del self._jobs[request]
            job.cancel()
            if isinstance(error, QueueFullError):
                raise self._queue_full(str(error), sequences) from None
            raise

    def abort_all(self) -> None:
        """Ends every request; its client gets an error."""
        for job in set(self._jobs.values()):
            job.fail(shutting_down())

    @property
    def admitted(self) -> int:
        """Sequences that hold capacity."""
        return self._admitted

    def _queue_full(self, message: str, sequences: int) -> ApiError:
        self.metrics.rejections["max_num_queued_reqs"] += 1
        headers = {"Retry-After": str(self._retry_after(sequences))}
        return ApiError(429, message, code="queue_full", headers=headers)

    def _retry_after(self, sequences: int) -> int:
        """Seconds until that many places should be free, from the pace of the last finishes; 1 to 60."""
        if len(self._finishes) < 2:
            return 1
        pace = (self._finishes[-1] - self._finishes[0]) / (len(self._finishes) - 1)
        return min(60, max(1, math.ceil(pace * sequences)))

    def _deliver(self) -> None:
        end = time.perf_counter() + SLICE_SECONDS
        for _ in range(_MAX_OUTPUTS // _OUTPUTS_AT_ONCE):
            outputs = self.loaded.engine.pop_outputs(_OUTPUTS_AT_ONCE)
            self._pass_on(outputs)
            if len(outputs) < _OUTPUTS_AT_ONCE or time.perf_counter() > end:
                return

    def _pass_on(self, outputs: Sequence[_core.EngineOutput]) -> None:
        now = time.perf_counter()
        for engine_output in outputs:
            job = self._jobs.get(engine_output.id)
            if job is None:  # a disconnected client, or a stop string that was found
                continue
            job.observe(engine_output, self.metrics, now)
            job.take(engine_output)

    def _ended(self, job: EngineJob, name: str, outcome: str) -> None:
        """Called when a job's sequence needs no more outputs."""
        if self._jobs.pop(name, None) is None:  # it was never queued
            return
        self.metrics.outcomes[outcome] += 1
        if outcome in ("abort", "error"):
            return
        now = time.perf_counter()
        self._finishes.append(now)
        self.metrics.request_seconds.observe(now - job.arrival)
        job.observe_end(name, self.metrics)
