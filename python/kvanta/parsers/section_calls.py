"""Calls in a section of a text, as DeepSeek V3, DeepSeek V3.1 and Kimi K2 write them: their arguments are JSON."""

from __future__ import annotations

import re
from typing import Any

from kvanta.parsers.call_reader import Found, StateReader
from kvanta.parsers.lenient_json import LenientJson

_MAX_HEADER = 1024


class SectionCalls(StateReader):
    """Section mark, then for each call: mark, header with the function's name, JSON, mark; and a mark at the end."""

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    header: re.Pattern[str]
    """Up to the first character of the arguments; groups `name` and, where the syntax has it, `id`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._json = LenientJson()

    def _content(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before((self.section_begin, self.call_begin), final=final)
        self._show(found, before)
        self._raw = mark
        self._state = {"": self._content, self.section_begin: self._section}.get(mark, self._header)
        return bool(mark)

    def _section(self, found: Found, final: bool) -> bool:
        """Between calls."""
        space = self._buffer.take(len(self._buffer.text) - len(self._buffer.text.lstrip()))
        self._raw += space if self._raw else ""
        for mark, state in ((self.call_begin, self._header), (self.section_end, self._content)):
            if self._buffer.text.startswith(mark):
                self._raw += self._buffer.take(len(mark))
                if state == self._content:  # a section without calls shows nothing
                    self._raw = ""
                self._state = state
                return True
        if not final and self._buffer.may_become(self.call_begin, self.section_end):
            return False
        if self._raw:
            return self._give_up(found)
        self._state = self._content
        return bool(self._buffer.text)

    def _header(self, found: Found, final: bool) -> bool:
        match = self.header.match(self._buffer.text)
        if match is not None:
            groups = match.groupdict()
            self._begin_call(found, groups["name"], groups.get("id") or "")
            self._buffer.take(match.end())
            self._json = LenientJson()
            self._state = self._arguments
            return True
        broken = self._buffer.find((self.call_end, self.section_end)) is not None
        if final or broken or len(self._buffer.text) > _MAX_HEADER:
            return self._give_up(found)
        return False

    def _arguments(self, found: Found, final: bool) -> bool:
        before, mark = self._buffer.take_before((self.call_end, self.section_end), final=final)
        if not self._json.ended:
            self._add_arguments(found, self._json.take(before, final=bool(mark)))
        if not mark:
            return False
        self._end_call(found)
        self._state = self._section if mark == self.call_end else self._content
        return True


class DeepSeekV3Calls(SectionCalls):
    """DeepSeek V3 and R1: the type, the name, and the arguments in a block of Markdown."""

    section_begin, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
    call_begin, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
    separator = "<｜tool▁sep｜>"  # noqa: RUF001
    header = re.compile(r"\s*\w*<｜tool▁sep｜>(?P<name>[^\n<]+?)\s*\n\s*(?:```(?:json)?\s*)?(?=[{\[\"])")  # noqa: RUF001
    marks = (section_begin, section_end, call_begin, call_end, separator)


class DeepSeekV31Calls(DeepSeekV3Calls):
    """DeepSeek V3.1: the name and the arguments."""

    header = re.compile(r"\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*(?=\S)")  # noqa: RUF001


class KimiK2Calls(SectionCalls):
    """Kimi K2, whose templates need the ids that the model gave: functions.NAME:0."""

    section_begin, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_begin, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    argument_begin = "<|tool_call_argument_begin|>"
    header = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\S)"
    )
    marks = (section_begin, section_end, call_begin, call_end, argument_begin)
