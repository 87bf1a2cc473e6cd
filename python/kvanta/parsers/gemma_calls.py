"""Calls as Gemma 4 writes them: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:5}<tool_call|>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvanta.parsers.call_reader import JSON_READER, Found, StateReader
from kvanta.parsers.text_buffer import overlap
from kvanta.parsers.xml_calls import argument_schemas, converted, types_of

_BEGIN, _END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_HEADER = re.compile(r"\s*(?:call)?:\s*(?P<name>[^\s:{}<]+)\s*(?=\{)")
_MAX_HEADER = 256
_SPACE, _SPACE_OR_COMMA = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")
_COLON, _VALUE_END = re.compile(":"), re.compile(r"[,}\]]")
_JSON_MARK = re.compile(r'\\.|\\$|"', re.DOTALL)
_LENIENT_JSON = json.JSONDecoder(strict=False)  # with line ends in texts
_CLOSES = {"{": "}", "[": "]"}


class GemmaObject:
    """Turns one object of Gemma's syntax into JSON as it grows. JSON in its place is taken, too.

    Keys are bare or texts, and texts stand between marks. `properties`: schemas of the keys, which tell what a bare
    word is, and what a text should have been. The time is linear in the text, however it was cut.
    """

    def __init__(self, properties: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.ended = False
        self._properties = properties
        self._text, self._at = "", 0
        """What has come, and the place of what has not been used."""
        self._held: list[str] = []
        """Pieces of a word that is used when it is complete."""
        self._open: list[str] = []
        """"{" and "[" that are not closed."""
        self._filled: list[bool] = []
        """They have an entry before the next one."""
        self._key = ""
        self._written: list[str] = []
        self._final = False
        self._state = self._value

    def take(self, text: str, *, final: bool = False) -> str:
        """The JSON that is certain after `text`; with `final`, all of it, closed."""
        self._text, self._at, self._final = self._text[self._at :] + text, 0, final
        while not self.ended and self._state():
            pass
        if final and self._state == self._value_text:
            self._written.append('"')
        while final and self._open:
            self._close()
        written, self._written = "".join(self._written), []
        return written

    # States use up a part of the text, and return True if another one can go on.

    def _key_begin(self) -> bool:
        self._skip(_SPACE_OR_COMMA)
        if self._follows("}", "]"):
            return self._close()
        if self._follows(QUOTE):
            self._state = self._key_text
        elif self._may_follow(QUOTE):
            return False
        else:
            self._state = self._key_json if self._follows('"') else self._key_bare
        return True

    def _key_bare(self) -> bool:
        return self._named(self._word(_COLON), strip=True)

    def _key_text(self) -> bool:
        return self._named(self._quoted())

    def _key_json(self) -> bool:
        return self._named(self._json_text())

    def _named(self, name: str | None, *, strip: bool = False) -> bool:
        if name is None:
            return False
        self._key = name.strip() if strip else name
        self._written.append((", " if self._filled[-1] else "") + _json(self._key) + ": ")
        self._filled[-1] = True
        self._state = self._colon
        return True

    def _colon(self) -> bool:
        self._skip(_SPACE)
        if self._is_empty and not self._final:
            return False
        self._follows(":")
        self._state = self._value
        return True

    def _value(self) -> bool:
        in_list = bool(self._open) and self._open[-1] == "["
        self._skip(_SPACE_OR_COMMA if in_list else _SPACE)
        if in_list and self._follows("]", "}"):
            return self._close()
        if self._may_follow(QUOTE) and (in_list or not self._final):
            return False
        if in_list:
            self._written.append(", " if self._filled[-1] else "")
            self._filled[-1] = True
        if self._follows(QUOTE):
            types = self._types()
            is_text = not types or "string" in types
            self._written.append('"' if is_text else "")
            self._state = self._value_text if is_text else self._value_in_marks
        elif self._follows("{"):
            self._begin("{", self._key_begin)
        elif self._follows("["):
            self._begin("[", self._value)
        else:
            self._state = self._value_json if self._follows('"') else self._value_bare
        return True

    def _value_text(self) -> bool:
        """A text, as it comes."""
        end = self._text.find(QUOTE, self._at)
        until = end if end >= 0 else len(self._text) - (0 if self._final else overlap(self._text[-len(QUOTE) :], QUOTE))
        self._written.append(_json(self._text[self._at : max(self._at, until)])[1:-1])
        self._at = max(self._at, until)
        if end < 0:
            return False
        self._at += len(QUOTE)
        return self._use('"')

    def _value_in_marks(self) -> bool:
        """Something else, which is between the marks of a text."""
        word = self._quoted()
        return word is not None and self._use(_json(converted(word, self._types())))

    def _value_json(self) -> bool:
        word = self._json_text()
        return word is not None and self._use(_json(word))

    def _value_bare(self) -> bool:
        """A number, true, false, null, or a text without marks."""
        word = self._word(_VALUE_END)
        return word is not None and self._use(_json(self._meant(word.strip())))

    def _meant(self, word: str) -> Any:
        types = self._types()
        if types:
            return converted(word, types)
        try:
            return JSON_READER.decode(word)
        except (ValueError, RecursionError):
            return word or None

    def _after(self) -> bool:
        """Reads on after a value, and drops text that is neither a comma nor an end."""
        end = _VALUE_END.search(self._text, self._at)
        self._at = end.end() if end else len(self._text)
        if end is None:
            return False
        if end[0] != ",":
            return self._close()
        self._state = self._key_begin if self._open[-1] == "{" else self._value
        return True

    def _use(self, written: str) -> bool:
        """Writes a value."""
        self._written.append(written)
        self._state = self._after
        if not self._open:  # no object at all
            self.ended = True
        return True

    def _begin(self, bracket: str, state: Callable[[], bool]) -> None:
        self._written.append(bracket)
        self._open.append(bracket)
        self._filled.append(False)
        self._state = state

    def _close(self) -> bool:
        self._written.append(_CLOSES[self._open.pop()])
        self._filled.pop()
        self.ended = not self._open
        self._state = self._after
        return True

    def _types(self) -> set[str]:
        """The types of the argument; none for what is within one."""
        return types_of(self._properties.get(self._key)) if len(self._open) == 1 else set()

    # Parts of the text.

    @property
    def _is_empty(self) -> bool:
        return self._at == len(self._text)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _follows(self, *marks: str) -> bool:
        """Uses up one of the marks."""
        for mark in marks:
            if self._text.startswith(mark, self._at):
                self._at += len(mark)
                return True
        return False

    def _may_follow(self, mark: str) -> bool:
        """The rest is the beginning of the mark, or nothing."""
        rest = self._text[self._at : self._at + len(mark)]
        return len(rest) < len(mark) and mark.startswith(rest)

    def _hold(self, end: int, after: int, *, complete: bool) -> str | None:
        self._held.append(self._text[self._at : end])
        self._at = after
        if not complete:
            return None
        word, self._held = "".join(self._held), []
        return word

    def _word(self, end: re.Pattern[str]) -> str | None:
        """Text up to the match, which stays; None: not complete."""
        found = end.search(self._text, self._at)
        at = found.start() if found else len(self._text)
        return self._hold(at, at, complete=found is not None or (self._final and end is _VALUE_END))

    def _quoted(self) -> str | None:
        """Text up to the closing mark, without it; None: not complete."""
        end = self._text.find(QUOTE, self._at)
        if end >= 0:
            return self._hold(end, end + len(QUOTE), complete=True)
        kept = 0 if self._final else overlap(self._text[max(self._at, len(self._text) - len(QUOTE)) :], QUOTE)
        until = len(self._text) - kept
        return self._hold(until, until, complete=self._final and self._state == self._value_in_marks)

    def _json_text(self) -> str | None:
        """A JSON text up to its end, which is used up; None: not complete."""
        until = len(self._text)
        for mark in _JSON_MARK.finditer(self._text, self._at):
            if mark[0] == '"':
                return _decoded(self._hold(mark.start(), mark.end(), complete=True) or "")
            if len(mark[0]) == 1 and not self._final:
                until -= 1
        written = self._hold(until, until, complete=self._final and self._state == self._value_json)
        return None if written is None else _decoded(written)


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
            self._object = GemmaObject(argument_schemas(self._schemas.get(match["name"]) or {}))
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _decoded(written: str) -> str:
    """The text with JSON's escapes decoded; unchanged if one of them is not JSON's."""
    try:
        return str(_LENIENT_JSON.decode(f'"{written}"'))
    except ValueError:
        return written
