"""Calls as Mistral's models write them.

Up to tokenizer version 7: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]
From version 11 on:        [TOOL_CALLS]name{...}[TOOL_CALLS]name{...}, also with [CALL_ID] and [ARGS] after the name
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from kvanta.parsers.call_reader import Found, StateReader
from kvanta.parsers.lenient_json import JSON_READER, LenientJson

_BEGIN = "[TOOL_CALLS]"
_HEADER = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*(?:\[CALL_ID\](?P<id>[\w-]+))?\s*(?:\[ARGS\])?\s*(?=\{)")
_MAX_HEADER = 256
_ENDS = "]} \t\r\n"
"""Characters that a model may write after a call's end."""


class MistralCalls(StateReader):
    """Reads both forms of calls. The older form is sent when complete, the newer one while it is written."""

    marks = (_BEGIN, "[CALL_ID]", "[ARGS]")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._json = LenientJson()
        self._value = ""
        """JSON of an entry of a list."""

    def _new_id(self) -> str:
        return uuid.uuid4().hex[:9]  # Mistral's templates take nine letters and digits only

    def _content(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before((_BEGIN,), final=final)
        self._show(found, before)
        if not mark:
            return False
        self._raw, self._state = mark, self._header
        return True

    def _header(self, found: Found, final: bool) -> bool:
        text = self._buffer.text.lstrip()
        if text.startswith(("[", "{")):
            self._buffer.skip_space()
            self._raw += self._buffer.take(1) if text[0] == "[" else ""
            self._state = self._between
            return True
        match = _HEADER.match(self._buffer.text)
        if match is not None:
            self._begin_call(found, match["name"], match["id"] or "")
            self._buffer.take(match.end())
            self._json = LenientJson()
            self._state = self._arguments
            return True
        if final or len(text) > _MAX_HEADER or _BEGIN in text:
            return self._give_up(found)
        return False

    def _arguments(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before((_BEGIN,), final=final)
        self._add_arguments(found, self._json.take(before, final=bool(mark)))
        if not mark and not self._json.ended:
            return False
        self._end_call(found)
        self._buffer.put_back(self._json.rest + mark)
        self._state = self._after
        return True

    def _after(self, found: Found, final: bool) -> bool:
        """Drops ends that are too many."""
        text = self._buffer.text
        self._buffer.take(len(text) - len(text.lstrip(_ENDS)))
        if not self._buffer.text:
            return False
        self._state = self._content
        return True

    def _between(self, found: Found, final: bool) -> bool:
        """Between the objects of a list."""
        text = self._buffer.text.lstrip(",} \t\r\n")
        if text.startswith("{"):
            self._raw += self._buffer.take(len(self._buffer.text) - len(text))
            self._json, self._value = LenientJson(), ""
            self._state = self._object
            return True
        if text.startswith("]"):
            self._buffer.take(len(self._buffer.text) - len(text) + 1)
            self._raw, self._state = "", self._content
            return True
        return self._give_up(found) if text or final else False

    def _object(self, found: Found, final: bool) -> bool:
        before = self._buffer.take()
        self._value += self._json.take(before)
        self._raw += before[: len(before) - len(self._json.rest)]
        if not self._json.ended:
            return self._give_up(found) if final else False
        self._buffer.put_back(self._json.rest)
        try:
            calls = self._read([JSON_READER.decode(self._value)])
        except (ValueError, RecursionError):
            calls = None
        if calls is None:
            return self._give_up(found)
        found.calls += calls
        self._raw, self._state = "", self._between
        return True
