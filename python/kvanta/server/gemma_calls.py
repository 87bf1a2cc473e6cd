"""Calls as Gemma 4 writes them: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>."""

from __future__ import annotations

import json
import re
from typing import Any

from kvanta.server.call_reader import JSON_READER, Found, StateReader
from kvanta.server.text_buffer import TextBuffer

_BEGIN, _END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEADER = re.compile(r"\s*(?:call)?:\s*(?P<name>[^\s:{}<]+)\s*(?=\{)")
_MAX_HEADER = 256
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE_ENDS = (",", "}", "]")
_CLOSES = {"{": "}", "[": "]"}


class GemmaObject:
    """Turns one object of Gemma's syntax into JSON as it grows: keys are bare, texts stand between marks."""

    def __init__(self) -> None:
        self.ended = False
        self._buffer = TextBuffer()
        self._open: list[str] = []
        """"{" and "[" that are not closed."""
        self._filled: list[bool] = []
        """They have an entry before the next one."""
        self._state = self._value

    def take(self, text: str, *, final: bool = False) -> str:
        """The JSON that is certain after `text`; with `final`, all of it, closed."""
        self._buffer.add(text)
        written: list[str] = []
        while not self.ended and self._state(written, final):
            pass
        if final and self._state == self._text:
            written.append('"')
        while final and self._open:
            self._close(written)
        return "".join(written)

    def _key(self, written: list[str], final: bool) -> bool:
        self._skip(" \t\r\n,")
        if self._buffer.text.startswith(("}", "]")):
            self._buffer.take(1)
            return self._close(written)
        name = self._quoted() if self._buffer.text.startswith((QUOTE, '"')) else self._bare_key()
        if name is None:
            return False
        written.append((", " if self._filled[-1] else "") + json.dumps(name, ensure_ascii=False) + ": ")
        self._filled[-1] = True
        self._state = self._colon
        return True

    def _bare_key(self) -> str | None:
        hit = self._buffer.find((":",))
        return None if hit is None else self._buffer.take(hit[0]).strip()

    def _quoted(self) -> str | None:
        """A key between marks, or in JSON; None: not complete."""
        text = self._buffer.text
        if text.startswith(QUOTE):
            end = text.find(QUOTE, len(QUOTE))
            return self._buffer.take(end + len(QUOTE))[len(QUOTE) : -len(QUOTE)] if end >= 0 else None
        string = _JSON_STRING.match(text)
        return _text_of(self._buffer.take(string.end())) if string else None

    def _colon(self, written: list[str], final: bool) -> bool:
        self._skip(" \t\r\n")
        if not self._buffer.text and not final:
            return False
        if self._buffer.text.startswith(":"):
            self._buffer.take(1)
        self._state = self._value
        return True

    def _value(self, written: list[str], final: bool) -> bool:
        in_list = bool(self._open) and self._open[-1] == "["
        self._skip(" \t\r\n," if in_list else " \t\r\n")
        text = self._buffer.text
        if in_list and text.startswith(("]", "}")):
            self._buffer.take(1)
            return self._close(written)
        if self._buffer.may_become(QUOTE) and not final:
            return False
        comma = ", " if in_list and self._filled[-1] else ""
        if text.startswith(QUOTE):
            self._buffer.take(len(QUOTE))
            value, self._state = '"', self._text
        elif text.startswith(("{", "[")):
            value = self._buffer.take(1)
            self._state = self._key if value == "{" else self._value
        else:
            bare = self._bare(final)
            if bare is None:
                return False
            value = bare
            self._state = self._after
        written.append(comma + value)
        if in_list:
            self._filled[-1] = True
        if value in _CLOSES:
            self._open.append(value)
            self._filled.append(False)
        return True

    def _bare(self, final: bool) -> str | None:
        """A number, true, false, null, or a text without marks; None: not complete."""
        text = self._buffer.text
        if text.startswith('"'):
            string = _JSON_STRING.match(text)
            if string is None and not final:
                return None
            end = string.end() if string else len(text)
        else:
            hit = self._buffer.find(_BARE_ENDS)
            if hit is None and not final:
                return None
            end = hit[0] if hit else len(text)
        word = self._buffer.take(end).strip()
        try:
            return json.dumps(JSON_READER.decode(word), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(word, ensure_ascii=False) if word else "null"

    def _text(self, written: list[str], final: bool) -> bool:
        before, mark = self._buffer.take_before((QUOTE,), final=final)
        written.append(json.dumps(before, ensure_ascii=False)[1:-1])
        if not mark:
            return False
        written.append('"')
        self._state = self._after
        return True

    def _after(self, written: list[str], final: bool) -> bool:
        """Behind a value: text that is neither a comma nor an end is left out."""
        hit = self._buffer.find(_BARE_ENDS)
        if hit is None:
            return False
        self._buffer.take(hit[0] + 1)
        if hit[1] != ",":
            return self._close(written)
        self._state = self._key if self._open[-1] == "{" else self._value
        return True

    def _close(self, written: list[str]) -> bool:
        written.append(_CLOSES[self._open.pop()])
        self._filled.pop()
        self.ended = not self._open
        self._state = self._after
        return True

    def _skip(self, characters: str) -> None:
        text = self._buffer.text
        self._buffer.take(len(text) - len(text.lstrip(characters)))


class Gemma4Calls(StateReader):
    """Arguments become JSON as they come."""

    marks = (_BEGIN, _END, QUOTE)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._object = GemmaObject()

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
            self._object = GemmaObject()
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


def _text_of(written: str) -> str:
    try:
        return str(JSON_READER.decode(written))
    except (ValueError, RecursionError):
        return written
