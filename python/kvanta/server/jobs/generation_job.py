"""One HTTP request in the engine: the texts of its prompts, as they grow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvanta import _core
from kvanta.engine.generation import Generation
from kvanta.outputs import CompletionOutput, FlatLogprobs
from kvanta.server.http.errors import api_error
from kvanta.server.http.time_slices import discard_values
from kvanta.server.jobs.engine_job import EngineJob
from kvanta.server.jobs.metrics import Metrics


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
    """Finish reason when the content came: the output itself keeps growing while a long answer is written."""
    stop_reason: str | int | None = None

    @property
    def finished(self) -> bool:
        """True for the last content of its text."""
        return self.finish_reason is not None

    @property
    def ended(self) -> bool:
        """The model has ended its text: neither a limit nor a stop string has cut it off."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)


class GenerationJob(EngineJob):
    """Texts, with what is new since the last read."""

    def __init__(
        self,
        generations: Sequence[Generation],
        ended: Callable[[EngineJob, str, str], None],
        abort: Callable[[str], None],
        done: Callable[[], None],
        arrival: float,
    ) -> None:
        self.generations = list(generations)
        self._last_token: dict[str, float] = {}
        self.first_token_at = 0.0
        """time.perf_counter() at the first token of any text; 0: none has come."""
        self._progress: dict[str, _core.EngineOutput] = {}
        """Last output with a token, by request of the engine."""
        self._owners: dict[str, tuple[Generation, int]] = {}
        self.outputs: list[CompletionOutput] = []
        """Indexed by choice."""
        for generation in generations:
            for name, completion in generation.completions.items():
                self._owners[name] = (generation, len(self.outputs))
                self.outputs.append(completion.output)
        self._pending: dict[int, Delta] = {}
        self._interval = self.generations[0].params.stream_interval or 1
        super().__init__(self._owners, ended, abort, done, arrival)

    def take(self, engine_output: _core.EngineOutput) -> None:
        """Adds one step's output of one sequence."""
        generation, choice = self._owners[engine_output.id]
        output = self.outputs[choice]
        begin = len(output.token_ids)
        try:
            text = generation.take(engine_output)
        except (
            Exception
        ) as error:  # a grammar too complex, a failure of the engine, or a defect of Kvanta: others must continue
            self.fail(api_error(error))
            return
        if self._failed(engine_output, output.finish_reason):
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

    def observe(self, engine_output: _core.EngineOutput, metrics: Metrics, now: float) -> None:
        """Counts the time until a token."""
        if not engine_output.tokens:
            return
        name, times = engine_output.id, engine_output.times
        last = self._last_token.get(name)
        if last is None:
            self.first_token_at = self.first_token_at or now
            metrics.time_to_first_token.observe(now - self.arrival)
            metrics.queue_seconds.observe(times.scheduled - times.added)
        else:
            metrics.inter_token.observe(now - last)
            metrics.largest_gap.observe(now - last, now)
        self._last_token[name] = now
        self._progress[name] = engine_output

    def observe_end(self, name: str, metrics: Metrics) -> None:
        """Counts the tokens and times of a text."""
        generation, choice = self._owners[name]
        tokens = len(self.outputs[choice].token_ids)
        metrics.prompt_tokens.observe(len(generation.output.prompt_token_ids))
        metrics.generated_tokens.observe(tokens)
        progress = self._progress.pop(name, None)
        if progress is not None:
            metrics.observe_progress(progress, len(generation.output.prompt_token_ids), tokens)
        if generation.output.finished:
            metrics.longest_text.observe(max(len(each.token_ids) for each in generation.output.outputs))

    def whole(self, choice: int) -> Delta:
        """All content of a finished text."""
        output = self.outputs[choice]
        tokens = len(output.token_ids)
        return Delta(choice, output.text, 0, tokens, output.finish_reason, output.stop_reason)

    def discard_logprobs(self) -> None:
        """Frees the log-probabilities of a job that has ended, on a thread that lets others run in between.

        The tokens stay: the log counts them.
        """
        found: list[object] = [output.logprobs for output in self.outputs]
        found += [generation.output.prompt_logprobs for generation in self.generations]
        for logprobs in found:
            if isinstance(logprobs, FlatLogprobs):
                for values in vars(logprobs).values():
                    discard_values(values)

    def nudge(self) -> None:
        """Lets the reader of `deltas` go on, even if there is nothing new."""
        self._wake.set()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New content as it arrives; pieces since the last read are joined. Nothing after a `nudge`.

        Ends at once when the job is cancelled.

        Raises ApiError when the job failed.
        """
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
            if self.cancelled or (not self.open and not self._pending):  # what was not due never will be
                return
            if not due:
                yield []

    def _is_due(self, delta: Delta) -> bool:
        """True if the content is the first or the last, or has at least `stream_interval` tokens.

        The first content is sent with what belongs to the prompt, and so waits for it.
        """
        if delta.begin == 0:
            texts = len(self.outputs) // len(self.generations)
            return not self.generations[delta.choice // texts].awaits_prompt_logprobs
        return delta.finished or delta.end - delta.begin >= self._interval
