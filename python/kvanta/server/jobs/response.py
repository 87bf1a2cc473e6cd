"""The answer to a request for texts: whole, or as a stream of server-sent events."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvanta.server.http.errors import ApiError, json_bytes
from kvanta.server.http.idle_timer import IdleTimer
from kvanta.server.http.time_slices import Pace, discard, json_pieces, large_json_bytes
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.requests.protocol import SamplingFields

DONE = b"data: [DONE]\n\n"
LEVELS_HEADER = "x-kvanta-kv-levels"
_MAX_ENTRIES = 2000
"""Entries of an answer that are written at once; more are written on another thread."""

Encode = Callable[[object], bytes]
Result = TypeVar("Result")


class OffLoop(Protocol):
    """Calls a function on another thread."""

    def __call__(self, build: Callable[[], Result]) -> Awaitable[Result]: ...


def event(value: object, encode: Encode = json_bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(value: Mapping[str, Any], encode: Encode = json_bytes) -> bytes:
    """One server-sent event under the name of its type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value, encode)


def large_body(whole: object) -> list[bytes]:
    """A large answer in pieces of JSON, on a thread that lets others run in between; `whole` is emptied."""
    pieces = json_pieces(whole)
    discard(whole)
    return pieces


class GenerationResponse(ABC):
    """A response of any endpoint; subclasses write its body and its events."""

    media_type = "text/event-stream"
    """Of a stream."""
    ping: bytes = b": ping\n\n"
    """What a stream sends while there is nothing else: a comment, which every reader of events ignores."""

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._echoed_entries = 0
        """Size of what a whole answer, and the first and last event, repeat of the request."""
        params = job.generations[0].params
        self._entries_per_token = 0 if params.num_logprobs is None else params.num_logprobs + 1
        prompt_tokens = sum(len(generation.output.prompt_token_ids) for generation in job.generations)
        self._prompt_entries = 0 if params.prompt_logprobs is None else prompt_tokens * (params.prompt_logprobs + 1)

    @abstractmethod
    def whole(self) -> object:
        """The whole answer, when the job is finished."""

    @abstractmethod
    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        """Events before the first token."""

    @abstractmethod
    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        """Events with the new content of a text."""

    @abstractmethod
    def _last_events(self) -> Iterator[bytes]:
        """Events after the last token."""

    @abstractmethod
    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        """Events instead of the last ones: the status has been sent already."""

    def _completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._job.outputs)

    def usage(self) -> dict[str, Any]:
        """Usage so far."""
        prompt = sum(len(generation.output.prompt_token_ids) for generation in self._job.generations)
        cached = sum(generation.output.num_cached_tokens for generation in self._job.generations)
        completion = self._completion_tokens()
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        drafted = sum(output.num_draft_tokens for output in self._job.outputs)
        if drafted:
            accepted = sum(output.num_accepted_tokens for output in self._job.outputs)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        records = [output.kv_cache for output in self._job.outputs]
        known = [record for record in records if record is not None]
        if known:
            usage["kv_cache"] = {
                "levels": known[0].levels,
                "choices": [
                    {"pages": record.pages, "events": record.events, "replayable": record.replayable}
                    for record in known
                ],
            }
        return usage

    def headers(self) -> dict[str, str]:
        """Headers of a whole answer, when the job is finished."""
        records = [output.kv_cache for output in self._job.outputs if output.kv_cache is not None]
        if not records:
            return {}
        pages = [sum(of_level) for of_level in zip(*(record.pages for record in records), strict=True)]
        named = zip(records[0].levels, pages, strict=True)
        return {LEVELS_HEADER: "; ".join(f"{level}={count}" for level, count in named)}

    def _entries(self, tokens: int, choices: int) -> int:
        """Size of a part of the answer: log-probabilities, and what a choice and its text cost in addition."""
        return tokens * self._entries_per_token + tokens // 8 + 16 * choices

    async def body(self, off_loop: OffLoop) -> list[bytes]:
        """The whole answer in JSON, in pieces, when the job is finished."""
        if self._all_entries() + self._echoed_entries <= _MAX_ENTRIES:
            return [json_bytes(self.whole())]
        return await off_loop(lambda: large_body(self.whole()))

    async def discard(self, off_loop: OffLoop) -> None:
        """Frees what is large when the job has ended: the connection would free it in one step of the event loop."""
        if self._all_entries() > _MAX_ENTRIES:
            await off_loop(self._job.discard_logprobs)

    def _all_entries(self) -> int:
        return self._entries(self._completion_tokens(), len(self._job.outputs)) + self._prompt_entries

    async def events(self, off_loop: OffLoop, ping_seconds: float) -> AsyncGenerator[bytes, None]:
        """Events until the job is finished, and a ping after each `ping_seconds` without one (0: never)."""
        pace = Pace()
        if self._echoed_entries <= _MAX_ENTRIES:
            first = self._first_events(json_bytes)
        else:
            first = iter([await off_loop(lambda: b"".join(self._first_events(large_json_bytes)))])
        for data in first:
            yield data
            await pace.rest()
        try:
            with IdleTimer(ping_seconds, self._job.nudge) as idle:
                async for deltas in self._job.deltas():
                    data = await self._events_of(deltas, off_loop, pace) or (self.ping if idle.expired else b"")
                    if data:
                        yield data
                        idle.restart()
        except ApiError as error:
            last = self._error_events(error)
        else:
            last = self._last_events()
        for data in last:
            yield data
        await self.discard(off_loop)

    async def _events_of(self, deltas: Sequence[Delta], off_loop: OffLoop, pace: Pace) -> bytes:
        events = []
        for delta in deltas:
            if self._delta_entries(delta) <= _MAX_ENTRIES:
                events.append(self._delta_events(delta, json_bytes))
            else:
                events.append(await off_loop(functools.partial(self._delta_events, delta, large_json_bytes)))
            await pace.rest()
        return b"".join(events)

    def _delta_entries(self, delta: Delta) -> int:
        """Size of a delta's events."""
        entries = self._entries(delta.end - delta.begin, 1) + (self._echoed_entries if delta.finished else 0)
        return entries + (self._prompt_entries if delta.begin == 0 else 0)


class ChoicesResponse(GenerationResponse):
    """A response of /v1/completions or /v1/chat/completions; subclasses give the shape of a choice."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, request_id: str, model: str, request: SamplingFields, job: GenerationJob) -> None:
        super().__init__(job)
        self._usage_last, self._usage_every = request.usage_in_stream
        self._token_ids = bool(request.return_token_ids)
        self._head = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model}

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """A finished text."""

    @abstractmethod
    def _opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks that come before the first token."""

    @abstractmethod
    def _pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """Choices with the new content of a text, each in its own chunk; none if there is nothing to send."""

    def _top_level(self) -> dict[str, Any]:
        """Fields next to the choices, in a whole answer and in a stream's first chunk."""
        return {}

    def _beside(self, _delta: Delta) -> dict[str, Any]:
        """Fields next to the choices, in a stream's chunk with new content."""
        return {}

    def whole(self) -> dict[str, Any]:
        """When the job is finished."""
        for generation in self._job.generations:
            generation.name_prompt_logprobs()
        choices = [self._choice(index) for index in range(len(self._job.outputs))]
        return {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            "usage": self.usage(),
            **self._top_level(),
        }

    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        extra = self._top_level()
        for choice in self._opening():
            yield event({**self._chunk([choice]), **extra}, encode)
            extra = {}

    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        if delta.begin == 0:
            for generation in self._job.generations:
                generation.name_prompt_logprobs()
        events, extra = [], self._beside(delta)
        for piece in self._pieces(delta):
            events.append(event({**self._chunk([piece]), **extra}, encode))
            extra = {}
        return b"".join(events)

    def _last_events(self) -> Iterator[bytes]:
        if self._usage_last:
            yield event({**self._chunk([]), "usage": self.usage()})
        yield DONE

    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body())
        yield DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        if self._usage_last:
            chunk["usage"] = self.usage() if self._usage_every else None
        return chunk
