"""The JSON that a model meant, from what it wrote, as the text grows.

Taken as well: line ends and quotes within texts, texts in single quotes or between Gemma's marks, keys and words
without quotes, the literals of Python, commas before an end, ends that are missing, of the wrong kind, or too many.
Valid JSON keeps its meaning: numbers and texts are written as they came.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from kvanta.parsers.text_buffer import overlap

QUOTE = '<|"|>'
"""Gemma's mark at the beginning and the end of a text."""
_TYPES: Mapping[str, Any] = {"integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list}
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"} | (
    dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity", "undefined"), "null")
)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ODD_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_SPACE, _SPACE_OR_COMMA = re.compile(r"\s*"), re.compile(r"[\s,]*")
_COLON, _VALUE_END, _BRACKET = re.compile(r"[:,}\]]"), re.compile(r"[,}\]]"), re.compile(r"[{\[]")
_TEXT_MARKS = {quote: re.compile(rf"\\|{quote}") for quote in "\"'"}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_AFTER_TEXT = re.compile(r"\s{0,64}(?P<next>\S)?")
_CLOSES = {"{": "}", "[": "]"}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number of JSON")
    return value


JSON_READER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
"""Reader for a model's JSON, which is written again: NaN, Infinity and 1e999 would not be JSON."""


class LenientJson:
    """Turns one object or list into JSON as it grows. The time is linear in the text, however it was cut."""

    def __init__(self, properties: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`properties`: schemas of the keys, which tell what a bare word is, and what a text should have been, in
        syntaxes that do not tell 1 from "1".
        """
        self.ended = False
        self._properties = properties
        self._text, self._at = "", 0
        """Text that has come, and the place of what has not been used."""
        self._held: list[str] = []
        """Pieces of a word that is used when it is complete."""
        self._open: list[str] = []
        """"{" and "[" that are not closed."""
        self._filled: list[bool] = []
        """They have an entry before the next one."""
        self._key = ""
        self._quote = ""
        self._written: list[str] = []
        self._final = False
        self._state = self._begin_value

    def take(self, text: str, *, final: bool = False) -> str:
        """The JSON that is certain after `text`; with `final`, all of it, closed."""
        self._text, self._at, self._final = self._text[self._at :] + text, 0, final
        while not self.ended and self._state():
            pass
        if final and self._state in (self._mark_text, self._quoted_text):
            self._written.append('"')
        if final and self._state == self._colon:
            self._written.append(": null")
        elif final and self._state == self._value and self._open[-1:] == ["{"]:
            self._written.append("null")
        while final and self._open:
            self._close()
        written, self._written = "".join(self._written), []
        return written

    @property
    def rest(self) -> str:
        """The text after the value."""
        return self._text[self._at :] if self.ended else ""

    # States use up a part of the text, and return True if another one can go on.

    def _begin_value(self) -> bool:
        """Drops what stands before the value, such as the mark of a block in Markdown."""
        begin = _BRACKET.search(self._text, self._at)
        self._at = begin.start() if begin else len(self._text)
        self._state = self._value if begin else self._begin_value
        return begin is not None

    def _key_begin(self) -> bool:
        self._skip(_SPACE_OR_COMMA)
        if self._follows("}", "]"):
            return self._close_up_to(self._text[self._at - 1])
        if self._follows(QUOTE):
            self._state = self._key_in_marks
        elif self._may_follow(QUOTE) or self._is_empty:
            return False
        else:
            self._state = self._key_quoted if self._quotes() else self._key_bare
        return True

    def _key_bare(self) -> bool:
        word = self._word(_COLON)
        if word is None:
            return False
        return self._named(_json(word.strip()), word.strip())

    def _key_in_marks(self) -> bool:
        name = self._in_marks()
        return name is not None and self._named(_json(name), name)

    def _key_quoted(self) -> bool:
        """A key in quotes: held until it is complete, since it may name a schema."""
        ended = self._write_text(self._held)
        if not ended:
            return False
        written, self._held = '"' + "".join(self._held) + '"', []
        try:
            return self._named(written, str(json.loads(written)))
        except ValueError:
            return self._named(written, written)

    def _named(self, written: str, name: str) -> bool:
        self._key = name
        self._written.append((", " if self._filled[-1] else "") + written)
        self._filled[-1] = True
        self._state = self._colon
        return True

    def _colon(self) -> bool:
        self._skip(_SPACE)
        if self._is_empty:
            return False
        self._follows(":")
        self._written.append(": ")
        self._state = self._value
        return True

    def _value(self) -> bool:
        in_list = bool(self._open) and self._open[-1] == "["
        self._skip(_SPACE_OR_COMMA if in_list else _SPACE)
        if in_list and self._follows("]", "}"):
            return self._close_up_to(self._text[self._at - 1])
        if self._may_follow(QUOTE) or self._is_empty:
            return False
        if in_list:
            self._written.append(", " if self._filled[-1] else "")
            self._filled[-1] = True
        if self._follows(QUOTE):
            types = self._types()
            is_text = not types or "string" in types
            self._written.append('"' if is_text else "")
            self._state = self._mark_text if is_text else self._value_in_marks
        elif self._follows("{"):
            self._begin("{", self._key_begin)
        elif self._follows("["):
            self._begin("[", self._value)
        elif self._quotes():
            self._written.append('"')
            self._state = self._quoted_text
        else:
            self._state = self._value_bare
        return True

    def _mark_text(self) -> bool:
        """A text between Gemma's marks, as it comes."""
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
        word = self._in_marks()
        return word is not None and self._use(_json(converted(word, self._types())))

    def _quoted_text(self) -> bool:
        """A text in quotes, as it comes."""
        return self._write_text(self._written) and self._use('"')

    def _write_text(self, written: list[str]) -> bool:
        """Writes what is certain of a text in quotes; True at its end, which is used up."""
        text, quote = self._text, self._quote
        while True:
            mark = _TEXT_MARKS[quote].search(text, self._at)
            until = mark.start() if mark else len(text)
            written.append(_json(text[self._at : until])[1:-1])
            self._at = until
            if mark is None:
                return False
            if mark[0] == quote:
                ends = self._ends_text(until + 1)
                if ends is None:
                    return False
                self._at += 1
                if ends:
                    return True
                written.append(_json(quote)[1:-1])
            elif escape := _ESCAPE.match(text, until):
                written.append(escape[0])
                self._at = escape.end()
            elif not self._final and len(text) - until < (6 if text.startswith("\\u", until) else 2):
                return False
            else:  # no escape of JSON: \' is a quote, and others stand for themselves
                self._at += 1
                if text.startswith("'", self._at):
                    written.append("'")
                    self._at += 1
                else:
                    written.append("\\\\")

    def _ends_text(self, after: int) -> bool | None:
        """True if a quote before `after` ends the text: no word follows it. None: too early to tell."""
        found = _AFTER_TEXT.match(self._text, after)
        if found is None or found["next"] is None:
            return True if self._final or len(self._text) - after >= 64 else None
        return not (found["next"].isalnum() or found["next"] == "_")

    def _value_bare(self) -> bool:
        """A number, true, false, null, or a text without marks."""
        word = self._word(_VALUE_END)
        return word is not None and self._use(self._meant(word.strip()))

    def _meant(self, word: str) -> str:
        """The JSON of a bare word."""
        types = self._types()
        if types:
            return _json(converted(word, types))
        if word in _LITERALS:
            return _LITERALS[word]
        if _ODD_NUMBER.fullmatch(word) and math.isfinite(float(word)):
            return word if _NUMBER.fullmatch(word) else _json(float(word))
        return _json(word or None)

    def _after(self) -> bool:
        """Reads on after a value; a quote without a comma begins the next entry."""
        self._skip(_SPACE)
        if self._is_empty or self._may_follow(QUOTE):
            return False
        if self._follows("}", "]"):
            return self._close_up_to(self._text[self._at - 1])
        if self._follows(",") or self._text.startswith(('"', "'", QUOTE), self._at):
            self._state = self._key_begin if self._open[-1] == "{" else self._value
        else:
            self._state = self._after_words
        return True

    def _after_words(self) -> bool:
        """Drops text that is neither a comma nor an end."""
        end = _VALUE_END.search(self._text, self._at)
        self._at = end.start() if end else len(self._text)
        self._state = self._after if end else self._after_words
        return end is not None

    def _use(self, written: str) -> bool:
        """Writes a value."""
        self._written.append(written)
        self._state = self._after
        return True

    def _begin(self, bracket: str, state: Callable[[], bool]) -> None:
        self._written.append(bracket)
        self._open.append(bracket)
        self._filled.append(False)
        self._state = state

    def _close_up_to(self, end: str) -> bool:
        """Also closes what is open within the object or list that this one ends."""
        depth = next((depth for depth in reversed(range(len(self._open))) if _CLOSES[self._open[depth]] == end), -1)
        for _ in range(len(self._open) - depth if depth >= 0 else 1):
            self._close()
        return True

    def _close(self) -> None:
        self._written.append(_CLOSES[self._open.pop()])
        self._filled.pop()
        self.ended = not self._open
        self._state = self._after

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

    def _quotes(self) -> bool:
        """Uses up a quote, and remembers which one."""
        for quote in _TEXT_MARKS:
            if self._follows(quote):
                self._quote = quote
                return True
        return False

    def _may_follow(self, mark: str) -> bool:
        """The rest is the beginning of the mark, and more may come."""
        rest = self._text[self._at : self._at + len(mark)]
        return not self._final and len(rest) < len(mark) and mark.startswith(rest)

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

    def _in_marks(self) -> str | None:
        """Text up to the closing mark, without it; None: not complete."""
        end = self._text.find(QUOTE, self._at)
        if end >= 0:
            return self._hold(end, end + len(QUOTE), complete=True)
        kept = 0 if self._final else overlap(self._text[max(self._at, len(self._text) - len(QUOTE)) :], QUOTE)
        until = len(self._text) - kept
        return self._hold(until, until, complete=self._final and self._state == self._value_in_marks)


def repaired(text: str) -> Any:
    """The first object or list of a text, which is close to JSON. Raises ValueError, or RecursionError."""
    return JSON_READER.decode(LenientJson().take(text, final=True))


def types_of(schema: Any) -> set[str]:
    """The types that a JSON schema allows, if it names them."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {kind for kind in declared if isinstance(kind, str)}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return {"string"}
    parts = schema.get("anyOf") or schema.get("oneOf")
    return set().union(*map(types_of, parts)) if isinstance(parts, list) else set()


def converted(text: str, types: set[str]) -> Any:
    """The value of an argument; the text itself where it is none of its types."""
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    if "string" in types:
        return text
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = JSON_READER.decode(text)
    except (ValueError, RecursionError):
        try:  # also as Python writes it
            value = repaired(text) if types & {"object", "array"} else text
        except (ValueError, RecursionError):
            return text
    fits = not types or value is None or any(isinstance(value, _TYPES.get(kind, object)) for kind in types)
    return value if fits else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
