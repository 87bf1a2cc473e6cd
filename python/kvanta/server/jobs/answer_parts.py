"""An answer as a list of parts: reasoning, text, calls. OpenAI calls them output items, Anthropic content blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kvanta.parsers.answer import AnswerShape
from kvanta.parsers.call_reader import Found
from kvanta.parsers.tool_calls import rest_of, whole_of
from kvanta.server.http.errors import ApiError, json_bytes
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import Encode, GenerationResponse, named_event
from kvanta.server.requests.protocol import ChatRequest

Kind = Literal["reasoning", "text", "call"]


@dataclass
class AnswerPart:
    """The known beginning of a part of the answer."""

    index: int
    kind: Kind
    text: str = ""
    """Reasoning, text, or the arguments of a call."""
    name: str = ""
    call_id: str = ""
    first_token: int = 0
    end_token: int = 0
    """Tokens of a text: [first_token, end_token), with those of reasoning and calls before it, as in chats."""


class PartsResponse(GenerationResponse):
    """One text, read into parts. Subclasses write the events of a part.

    A whole answer has reasoning, text and calls in this order; a stream has a new part where their order differs.
    """

    def __init__(self, request: ChatRequest, job: GenerationJob, shape: AnswerShape) -> None:
        super().__init__(job)
        prompt = job.generations[0].output.prompt or ""
        self._reader = shape.reader(prompt)
        self._count = shape.count(prompt)
        self._hides_reasoning = request.include_reasoning is False
        self._parts: list[AnswerPart] = []
        self._tokens_shown = 0

    @abstractmethod
    def _opened(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        """Events before a part's first text."""

    @abstractmethod
    def _grown(self, part: AnswerPart, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        """Events for new text of a part, with the answer's tokens since the last one."""

    @abstractmethod
    def _closed(self, part: AnswerPart, finish_reason: str | None) -> Iterator[dict[str, Any]]:
        """Events after a part's last text; `finish_reason` is that of the answer, for its last part."""

    @abstractmethod
    def _begin(self) -> Iterator[dict[str, Any]]:
        """Events before all parts."""

    @abstractmethod
    def _end(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Events after all parts."""

    @abstractmethod
    def _failed(self, error: ApiError) -> dict[str, Any]:
        """The event of an error."""

    def _write(self, value: dict[str, Any], encode: Encode) -> bytes:
        """One event."""
        return named_event(value, encode)

    def usage(self) -> dict[str, Any]:
        """Usage so far, with the tokens of reasoning."""
        usage = super().usage()
        tokens = 0 if self._count is None else self._count.update(self._job.outputs[0].token_ids)
        usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = tokens
        return usage

    @property
    def _calls(self) -> bool:
        """The answer has calls."""
        return any(part.kind == "call" for part in self._parts)

    def _read_whole(self) -> Delta:
        """Fills the parts of a finished job."""
        delta = self._job.whole(0)
        for _ in self._grow(whole_of(self._reader, delta.text, ended=delta.ended), delta.end):
            pass
        for _ in self._close(delta):
            pass
        return delta

    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        for each in self._begin():
            yield self._write(each, encode)

    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        found = rest_of(self._reader, delta.text) if delta.finished else self._reader.take(delta.text)
        events = [*self._grow(found, delta.end)]
        if delta.finished:
            events += [*self._close(delta), *self._end(delta)]
        return b"".join(self._write(each, encode) for each in events)

    def _last_events(self) -> Iterator[bytes]:
        yield from ()

    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        yield self._write(self._failed(error), json_bytes)

    def _delta_entries(self, delta: Delta) -> int:
        last = self._entries(delta.end, 4) * 4 if delta.finished else 0  # the last events repeat the whole answer
        return super()._delta_entries(delta) + last

    def _grow(self, found: Found, tokens: int) -> Iterator[dict[str, Any]]:
        if found.reasoning and not self._hides_reasoning:
            yield from self._add("reasoning", found.reasoning, tokens)
        if found.content:
            yield from self._add("text", found.content, tokens)
        for call in found.calls:
            function = call["function"]
            if "id" in call:
                yield from self._open("call", name=function["name"], call_id=call["id"])
            yield from self._add("call", function["arguments"], tokens)

    def _add(self, kind: Kind, text: str, tokens: int) -> Iterator[dict[str, Any]]:
        if not self._parts or self._parts[-1].kind != kind:
            yield from self._open(kind)
        part = self._parts[-1]
        part.text += text
        new = slice(self._tokens_shown, tokens)
        if kind == "text":
            self._tokens_shown = part.end_token = tokens
        if text:
            yield from self._grown(part, text, new)

    def _open(self, kind: Kind, *, name: str = "", call_id: str = "") -> Iterator[dict[str, Any]]:
        if self._parts:
            yield from self._closed(self._parts[-1], None)
        begin = self._tokens_shown
        part = AnswerPart(len(self._parts), kind, name=name, call_id=call_id, first_token=begin, end_token=begin)
        self._parts.append(part)
        yield from self._opened(part)

    def _close(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Closes the last part; an empty answer has one empty text."""
        if not self._parts:
            yield from self._open("text")
        part = self._parts[-1]
        if part.kind == "text":
            part.end_token = delta.end
        yield from self._closed(part, delta.finish_reason)
