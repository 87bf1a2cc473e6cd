"""The embeddings of one HTTP request: portions of its prompts in the engine, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from kvanta import _core
from kvanta.engine.embedding import Embedding
from kvanta.outputs import PoolingRequestOutput
from kvanta.server.http.errors import api_error
from kvanta.server.jobs.engine_job import EngineJob
from kvanta.server.jobs.metrics import Metrics
from kvanta.text.prompts import TokenPrompt


class EmbeddingJob(EngineJob):
    """The embeddings of a portion."""

    def __init__(
        self,
        embeddings: Sequence[Embedding],
        ended: Callable[[EngineJob, str, str], None],
        abort: Callable[[str], None],
        arrival: float,
    ) -> None:
        self._embeddings = {embedding.name: embedding for embedding in embeddings}
        self._preemptions: dict[str, int] = {}
        super().__init__(self._embeddings, ended, abort, lambda: None, arrival)

    @property
    def outputs(self) -> list[PoolingRequestOutput]:
        """Outputs in the order of the prompts."""
        return [embedding.output for embedding in self._embeddings.values()]

    def take(self, engine_output: _core.EngineOutput) -> None:
        """Takes the only output of a sequence."""
        embedding = self._embeddings[engine_output.id]
        try:
            embedding.take(engine_output)
        except Exception as error:  # the engine gave it up
            self.fail(api_error(error))
            return
        if not self._failed(engine_output, embedding.finish_reason):
            self._close(engine_output.id, embedding.finish_reason or "error")

    def observe(self, engine_output: _core.EngineOutput, metrics: Metrics, now: float) -> None:
        """Counts the time in the queue."""
        self._preemptions[engine_output.id] = engine_output.preemptions
        times = engine_output.times
        if times.scheduled:
            metrics.queue_seconds.observe(times.scheduled - times.added)

    def observe_end(self, name: str, metrics: Metrics) -> None:
        """Counts the prompt."""
        output = self._embeddings[name].output
        metrics.prompt_tokens.observe(len(output.prompt_token_ids))
        metrics.computed_tokens.observe(len(output.prompt_token_ids) - output.num_cached_tokens)
        metrics.preemptions.observe(self._preemptions[name])


class EmbeddingRun:
    """All portions. A request with thousands of prompts takes no more of the queue than one portion."""

    def __init__(
        self, prompts: Sequence[TokenPrompt], submit: Callable[[Sequence[TokenPrompt]], Awaitable[EmbeddingJob]]
    ):
        """`submit` queues a portion."""
        self._cancelled = asyncio.Event()
        self._prompts = prompts
        self._submit = submit
        self._job: EmbeddingJob | None = None

    @property
    def cancelled(self) -> bool:
        """True when outputs may be missing."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends the portion that is in the engine; there are no more."""
        self._cancelled.set()
        if self._job is not None:
            self._job.cancel()

    async def finish(self, portion: int) -> list[PoolingRequestOutput]:
        """One output per prompt, unless it was cancelled. Raises ApiError or InputError."""
        outputs: list[PoolingRequestOutput] = []
        for begin in range(0, len(self._prompts), portion):
            if self._cancelled.is_set():
                break
            self._job = await self._submit(self._prompts[begin : begin + portion])
            if self._cancelled.is_set():  # while it was queued
                self._job.cancel()
            await self._job.finish()
            if not self._cancelled.is_set():
                outputs += self._job.outputs
        return outputs
