"""Calls of functions in a model's text, as it grows.

    reader = make_reader(tools, "hermes")
    for delta in deltas:
        found = reader.take(delta)
    rest = reader.end()

Text that turns out not to be a call stays text, so no output of the model is lost.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvanta.errors import InputError
from kvanta.server.tools import Tools


@dataclass
class Found:
    """New in a text: what the user sees, and calls as a chunk's `tool_calls` has them."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class CallReader(ABC):
    """The calls in one text. At most one with `parallel` false, since templates may not mention that limit."""

    def __init__(self, *, parallel: bool = True) -> None:
        self.calls = 0
        self._max_calls = 1 if not parallel else None

    @abstractmethod
    def take(self, text: str) -> Found:
        """Content and calls that are certain after `text`."""

    @abstractmethod
    def end(self) -> Found:
        """The rest, when the text is finished."""

    def _new(self, name: str, arguments: str) -> list[dict[str, Any]]:
        if self.calls == self._max_calls:
            return []
        self.calls += 1
        return [
            {
                "index": self.calls - 1,
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        ]

    def _read(self, values: Sequence[Any]) -> list[dict[str, Any]] | None:
        """Calls of {"name", "arguments"}, or "parameters"; None if one of the values is something else."""
        found = []
        for value in values:
            if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
                return None
            arguments = value.get("arguments", value.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append((value["name"], written))
        return [call for name, written in found for call in self._new(name, written)]


class HermesCalls(CallReader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list of such objects, amid text."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"

    def __init__(self, *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._held = ""
        self._inside = False

    def take(self, text: str) -> Found:
        """A call when its end has come."""
        found = Found()
        seen = max(0, len(self._held) - len(self._END))  # searched before, but for the beginning of a mark
        self._held += text
        while True:
            mark = self._END if self._inside else self._BEGIN
            at = self._held.find(mark, seen if self._inside else 0)
            if at < 0:
                break
            before, self._held, seen = self._held[:at], self._held[at + len(mark) :], 0
            if self._inside:
                self._add(found, before, self._END)
            else:
                self._show(found, before)
            self._inside = not self._inside
        if not self._inside:
            sure = len(self._held) - _overlap(self._held, self._BEGIN)
            self._show(found, self._held[:sure])
            self._held = self._held[sure:]
        return found

    def end(self) -> Found:
        """A call without its end, too."""
        found = Found()
        if self._inside:
            self._add(found, self._held, "")
        else:
            self._show(found, self._held)
        return found

    def _add(self, found: Found, body: str, end: str) -> None:
        values = _values(body)
        calls = self._read(values) if values else None
        if calls is None:
            found.content += self._BEGIN + body + end
        else:
            found.calls += calls

    def _show(self, found: Found, text: str) -> None:
        """Line ends between calls are no content."""
        if not self.calls or text.strip():
            found.content += text


class JsonCalls(CallReader):
    """{"name": ..., "parameters": {...}}, several with semicolons between, or a list: the whole text, or none of it."""

    _BEGINNINGS = ("{", "[", "<|python_tag|>")

    def __init__(self, *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._held: list[str] = []
        self._is_json: bool | None = None
        """None: not enough has come to know."""

    def take(self, text: str) -> Found:
        """Nothing, unless the text begins with something else than a call."""
        if self._is_json is False:
            return Found(text)
        self._held.append(text)
        if self._is_json is None:
            begin = "".join(self._held).lstrip()
            if begin.startswith(self._BEGINNINGS):
                self._is_json = True
            elif not any(mark.startswith(begin) for mark in self._BEGINNINGS):
                self._is_json = False
                return self._rest()
        return Found()

    def end(self) -> Found:
        """All calls."""
        values = _values("".join(self._held).strip().removeprefix(self._BEGINNINGS[-1]))
        calls = self._read(values) if values else None
        return self._rest() if calls is None else Found(calls=calls)

    def _rest(self) -> Found:
        text, self._held = "".join(self._held), []
        return Found(text)


class NamedCall(CallReader):
    """The text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def take(self, text: str) -> Found:
        """The arguments as they come."""
        if not text:
            return Found()
        if not self.calls:
            return Found(calls=self._new(self._name, text))
        return Found(calls=[{"index": 0, "function": {"arguments": text}}])

    def end(self) -> Found:
        """Nothing is held back."""
        return Found()


Parser = Callable[..., CallReader]
PARSERS: Mapping[str, Parser] = {"hermes": HermesCalls, "llama3_json": JsonCalls}
"""By the names of vLLM; those of SGLang are aliases."""
_ALIASES: Mapping[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
}


def parser_name(name: str) -> str:
    """As PARSERS has it. Raises InputError for an unknown one."""
    known = _ALIASES.get(name, name)
    if known and known not in PARSERS:
        raise InputError(f"{name!r} is none of {', '.join([*PARSERS, *_ALIASES])}")
    return known


def make_reader(tools: Tools, parser: str) -> CallReader | None:
    """For one text of an answer; None where it is text alone. `parser`: a name of PARSERS, or empty."""
    if tools.named:
        return NamedCall(tools.choice)
    if tools.forced:
        return JsonCalls(parallel=tools.parallel)
    return PARSERS[parser](parallel=tools.parallel) if tools.may_call and parser else None


def rest_of(reader: CallReader, text: str) -> Found:
    """The last of a text, which may be all of it."""
    found, rest = reader.take(text), reader.end()
    return Found(found.content + rest.content, found.calls + rest.calls)


def _values(text: str) -> list[Any]:
    """The JSON values of a text, lists taken apart; none if it has anything else."""
    decoder, at, values = json.JSONDecoder(), 0, []
    text = text.strip()
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
            while at < len(text) and text[at] in "; \n\r\t":
                at += 1
    except (ValueError, RecursionError):
        return []
    return values


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that `mark` begins with."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if mark.startswith(text[-n:])), 0)
