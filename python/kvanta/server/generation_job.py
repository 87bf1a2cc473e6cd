"""One HTTP request in the engine: the texts of its prompts, as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvanta import _core
from kvanta.errors import InputError
from kvanta.generation import Generation
from kvanta.outputs import CompletionOutput
from kvanta.server.errors import ApiError, api_error
from kvanta.server.protocol import field_of


@dataclass
class Delta:
    """New content of one text since the last read."""

    choice: int
    """Over all prompts: prompt * n + text."""
    text: str
    begin: int
    end: int
    """The new tokens: output.token_ids[begin:end]."""
    finish_reason: str | None = None
    """As it was when the content came: the output itself goes on growing while a long answer is written."""
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """True for the last content of its text."""
        return self.finish_reason is not None


class GenerationJob:
    """Written by AsyncLLM, read by the one who answers the client; both on the event loop's thread.

    `ended(job, name, outcome)` is called once for each sequence, with its finish reason, "abort" or "error";
    `abort(name)` for those that the engine must drop; `done()` when none is open any more.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        ended: Callable[[GenerationJob, str, str], None],
        abort: Callable[[str], None],
        done: Callable[[], None],
        arrival: float,
    ) -> None:
        self.generations = list(generations)
        self.arrival = arrival
        self.cancelled = False
        self.last_token: dict[str, float] = {}
        self.progress: dict[str, _core.EngineOutput] = {}
        """By request of the engine: its last output with a token."""
        self._owners: dict[str, tuple[Generation, int]] = {}
        self.outputs: list[CompletionOutput] = []
        """Indexed by choice."""
        for generation in generations:
            for name, completion in generation.completions.items():
                self._owners[name] = (generation, len(self.outputs))
                self.outputs.append(completion.output)
        self.open = set(self._owners)
        self._ended = ended
        self._abort = abort
        self._when_done = done
        self._pending: dict[int, Delta] = {}
        self._interval = self.generations[0].params.stream_interval or 1
        self._error: ApiError | None = None
        self._wake = asyncio.Event()
        self._done = asyncio.Event()

    def owner(self, name: str) -> tuple[Generation, int]:
        """The generation of one of the engine's requests, and its choice."""
        return self._owners[name]

    def take(self, engine_output: _core.EngineOutput) -> None:
        """Adds one step's output of one sequence."""
        generation, choice = self._owners[engine_output.id]
        output = self.outputs[choice]
        begin = len(output.token_ids)
        try:
            text = generation.take(engine_output)
        except InputError as error:  # a form or a pattern turned out too complex
            self.fail(ApiError(400, str(error), param=field_of(str(error))))
            return
        except Exception as error:  # the engine gave it up, or a fault of ours; other requests must go on
            self.fail(api_error(error))
            return
        if output.finish_reason == "timeout":
            self.fail(ApiError(504, engine_output.error, code="request_timeout"))
            return
        if output.finish_reason == "abort":  # requested neither by the client nor by a stop string
            self.fail(ApiError(503, engine_output.error or "the request was aborted"))
            return
        delta = self._pending.setdefault(choice, Delta(choice, "", begin, begin))
        delta.text += text
        delta.end = len(output.token_ids)
        delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
        if output.finish_reason is not None:
            self._close(engine_output.id, output.finish_reason)
            if engine_output.finish == _core.FinishReason.NONE:  # a stop string
                self._abort(engine_output.id)
        if self._is_due(delta):
            self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends everything that is not finished; waiting callers get the error."""
        if self.open:
            self._error = error
            self._drop("error")

    def cancel(self) -> None:
        """Cancels the unfinished texts; their pages are freed at once."""
        self.cancelled = self.cancelled or bool(self.open)
        self._drop("abort")

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

    def whole(self, choice: int) -> Delta:
        """All content of a finished text."""
        output = self.outputs[choice]
        tokens = len(output.token_ids)
        return Delta(choice, output.text, 0, tokens, output.finish_reason, output.stop_reason)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New content as it arrives; pieces since the last read are joined. Raises ApiError when the job failed."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            due = [delta for delta in self._pending.values() if self._is_due(delta)]
            for delta in due:
                del self._pending[delta.choice]
            if due:
                yield due
            if self._error is not None:
                raise self._error
            if not self.open and not self._pending:
                return

    def _is_due(self, delta: Delta) -> bool:
        """The content is the first, or the last, or as much as `stream_interval` asks for."""
        return delta.begin == 0 or delta.finished or delta.end - delta.begin >= self._interval

    async def finish(self) -> None:
        """Waits for every text. Raises ApiError when the job failed."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
