"""One HTTP request in the engine: its sequences, until each has ended."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from kvanta import _core
from kvanta.server.http.errors import ApiError
from kvanta.server.jobs.metrics import Metrics


class EngineJob(ABC):
    """Written by AsyncLLM, read by the one who answers the client; both on the event loop's thread.

    `ended(job, name, outcome)` is called once for each sequence, with its finish reason, "abort" or "error";
    `abort(name)` for those that the engine must drop; `done()` when none is open any more.
    """

    def __init__(
        self,
        names: Iterable[str],
        ended: Callable[[EngineJob, str, str], None],
        abort: Callable[[str], None],
        done: Callable[[], None],
        arrival: float,
    ) -> None:
        """`names`: the engine's requests. `arrival`: time.perf_counter() when the HTTP request came."""
        self.arrival = arrival
        self.cancelled = False
        self.open = set(names)
        self._ended = ended
        self._abort = abort
        self._when_done = done
        self._error: ApiError | None = None
        self._wake = asyncio.Event()
        self._done = asyncio.Event()

    @abstractmethod
    def take(self, engine_output: _core.EngineOutput) -> None:
        """Adds one step's output of one sequence."""

    @abstractmethod
    def observe(self, engine_output: _core.EngineOutput, metrics: Metrics, now: float) -> None:
        """Counts the times of an output that is about to be taken. `now`: time.perf_counter()."""

    @abstractmethod
    def observe_end(self, name: str, metrics: Metrics) -> None:
        """Counts a sequence that has finished."""

    def fail(self, error: ApiError) -> None:
        """Ends everything that is not finished; waiting callers get the error."""
        if self.open:
            self._error = error
            self._drop("error")

    def cancel(self) -> None:
        """Cancels the unfinished sequences; their pages are freed at once."""
        self.cancelled = self.cancelled or bool(self.open)
        self._drop("abort")

    def _failed(self, engine_output: _core.EngineOutput, finish_reason: str | None) -> bool:
        """True, and the job ends, if the engine has ended a sequence that nobody asked it to end."""
        if finish_reason == "timeout":
            self.fail(ApiError(504, engine_output.error, code="request_timeout"))
        elif finish_reason == "abort":  # requested neither by the client nor by a stop string
            self.fail(ApiError(503, engine_output.error or "the request was aborted"))
        else:
            return False
        return True

    def _drop(self, outcome: str) -> None:
        for name in list(self.open):
            self._close(name, outcome)
            self._abort(name)
        self._wake.set()

    def _close(self, name: str, outcome: str) -> None:
        self.open.discard(name)
        self._ended(self, name, outcome)
        if not self.open:
            self._done.set()
            self._when_done()

    async def finish(self) -> None:
        """Waits for every sequence. Raises ApiError when the job failed."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
