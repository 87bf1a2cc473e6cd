"""Calls as Gemma 4 writes them: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>."""

from __future__ import annotations

import re
from typing import Any

from kvanta.parsers.call_reader import Found, StateReader
from kvanta.parsers.lenient_json import QUOTE, LenientJson
from kvanta.parsers.xml_calls import argument_schemas

_BEGIN, _END = "<|tool_call>", "<tool_call|>"
_HEADER = re.compile(r"\s*(?:call)?:\s*(?P<name>[^\s:{}<]+)\s*(?=\{)")
_MAX_HEADER = 256


class Gemma4Calls(StateReader):
    """Arguments become JSON as they come."""

    marks = (_BEGIN, _END, QUOTE)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._object = LenientJson()

    def _content(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before((_BEGIN, _END), final=final)
        self._show(found, before)
        if mark == _BEGIN:  # an end without a beginning shows nothing
            self._raw, self._state = mark, self._header
        return bool(mark)

    def _header(self, found: Found, final: bool) -> bool:
        match = _HEADER.match(self._buffer.text)
        if match is not None:
            self._begin_call(found, match["name"])
            self._buffer.take(match.end())
            self._object = LenientJson(argument_schemas(self._schemas.get(match["name"]) or {}))
            self._state = self._arguments
            return True
        broken = self._buffer.find((_BEGIN, _END)) is not None
        if final or broken or len(self._buffer.text) > _MAX_HEADER:
            return self._give_up(found)
        return False

    def _arguments(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before((_END, _BEGIN), final=final)
        if not self._object.ended:
            self._add_arguments(found, self._object.take(before, final=bool(mark)))
        if not mark:
            return False
        self._end_call(found)
        self._buffer.put_back(mark if mark == _BEGIN else "")
        self._state = self._content
        return True
