"""Bases of the readers of a model's text, which find calls of functions in it (tool_calls.py has the syntaxes).

    reader = make_reader(tools, "hermes")
    for delta in deltas:
        found = reader.take(delta)
    rest = reader.end()

The sum of what is found does not depend on how the text was cut. Text that turns out not to be a call stays text.
"""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvanta.parsers.lenient_json import JSON_READER, repaired
from kvanta.parsers.text_buffer import TextBuffer, pieces

_SEPARATORS = ";, \t\r\n"


@dataclass
class Found:
    """New in a text: what the user sees, calls as a chunk's `tool_calls` has them, and the model's reasoning."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls: the first piece has name and id, later ones only an index and arguments."""
    reasoning: str = ""

    def add_arguments(self, index: int, text: str) -> None:
        """Continues a call."""
        if self.calls and self.calls[-1]["index"] == index:
            self.calls[-1]["function"]["arguments"] += text
        elif text:
            self.calls.append({"index": index, "function": {"arguments": text}})

    def add(self, other: Found) -> None:
        """Appends what was found after it."""
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.calls:
            if "id" in call:
                self.calls.append(call)
            else:
                self.add_arguments(call["index"], call["function"]["arguments"])

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.reasoning)


class TextReader(Protocol):
    """Takes one text apart as it grows."""

    @property
    def calls(self) -> int:
        """Calls so far."""

    def take(self, text: str) -> Found:
        """The parts that are certain after `text`."""

    def end(self) -> Found:
        """The rest."""


class CallReader(ABC):
    """The calls in one text. At most one with `parallel` false, since templates may not mention that limit."""

    marks: tuple[str, ...] = ()
    """Tokens of the syntax that the text must show, even where they are special."""

    def __init__(self, *, parallel: bool = True, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`schemas`: of the arguments of every function, for syntaxes that do not tell 1 from "1"."""
        self.calls = 0
        self._max_calls = 1 if not parallel else None
        self._schemas = schemas or {}
        self._blank: str | None = ""
        """White space before any text, which is content if text follows, and nothing before a call; None: text came."""
        self._after_call = False

    @abstractmethod
    def take(self, text: str) -> Found:
        """Content and calls that are certain after `text`."""

    @abstractmethod
    def end(self) -> Found:
        """The rest, when the text is finished."""

    def _new_id(self) -> str:
        return f"call_{uuid.uuid4().hex}"

    def _new(self, name: str, arguments: str, call_id: str = "") -> list[dict[str, Any]]:
        self._blank, self._after_call = "", True
        if self.calls == self._max_calls:
            return []
        self.calls += 1
        return [
            {
                "index": self.calls - 1,
                "id": call_id or self._new_id(),
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
            written = _written(value.get("arguments", value.get("parameters")))
            if written is None:
                return None
            found.append((value["name"], written))
        return [call for name, written in found for call in self._new(name, written)]

    def _show(self, found: Found, text: str) -> None:
        """Adds content; white space before the first call, and also commas and semicolons between calls, are not."""
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip(_SEPARATORS if self._after_call else None) else text
            if self._blank is not None:
                return
            text = text.lstrip() if self._after_call else text
        found.content += text

    @property
    def _among_calls(self) -> bool:
        """A call was the last that came, but for white space."""
        return self._after_call and self._blank is not None

    def _show_blank(self, found: Found) -> None:
        """At the end: the white space of a text without calls."""
        if not self._after_call:
            found.content += self._blank or ""


def _written(arguments: Any) -> str | None:
    """Arguments as JSON, which may come as a text; None for those that are no object."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = JSON_READER.decode(arguments)
        except (ValueError, RecursionError):
            try:
                arguments = repaired(arguments)
            except (ValueError, RecursionError):
                return None
    if isinstance(arguments, Mapping):
        return json.dumps(arguments, ensure_ascii=False)
    return None if arguments else "{}"


State = Callable[[Found, bool], bool]


class StateReader(CallReader):
    """A machine whose states each use up a part of the text; its first one is `_content`.

    A state gets `found` and `final`, which says that no text follows. It returns True if another state can go on.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._buffer = TextBuffer()
        self._state: State = self._content
        self._raw = ""
        """Text of what may become a call, to be shown if it does not."""
        self._writes_call = False
        self._has_arguments = False

    def take(self, text: str) -> Found:
        """Arguments as they come, once the function's name is known."""
        found = Found()
        for piece in pieces(text):
            self._buffer.add(piece)
            found.add(self._run(final=False))
        return found

    def end(self) -> Found:
        """The rest. A call that is cut off keeps the arguments that it has."""
        among_calls = self._among_calls
        found = self._run(final=True)
        if among_calls and not found.calls:  # the rest is a call that is cut off
            found.content = ""
        self._show_blank(found)
        return found

    def _run(self, *, final: bool) -> Found:
        found = Found()
        while self._state(found, final):
            pass
        return found

    @abstractmethod
    def _content(self, found: Found, final: bool) -> bool: ...

    def _give_up(self, found: Found) -> bool:
        """Shows what is no call. The text after it is searched again."""
        self._show(found, self._raw or self._buffer.take(1))
        self._raw = ""
        self._state = self._content
        return bool(self._buffer.text)

    def _begin_call(self, found: Found, name: str, call_id: str = "") -> None:
        new = self._new(name, "", call_id)
        found.calls += new
        self._raw, self._writes_call, self._has_arguments = "", bool(new), False

    def _add_arguments(self, found: Found, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text)
        if self._writes_call:
            found.add_arguments(self.calls - 1, text)

    def _end_call(self, found: Found) -> None:
        if not self._has_arguments:
            self._add_arguments(found, "{}")
        self._writes_call = False
