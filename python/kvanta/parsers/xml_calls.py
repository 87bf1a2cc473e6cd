"""Calls whose arguments are tagged texts, as Qwen3-Coder and GLM-4.5 write them; the schema tells 1 from "1"."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvanta.constraints.json_schema import referenced
from kvanta.parsers.call_reader import Found, StateReader
from kvanta.parsers.call_values import repaired_values, values_of
from kvanta.parsers.lenient_json import converted, types_of


class XmlCalls(StateReader):
    """The arguments become JSON: texts as they come, other values when they are complete."""

    begins: tuple[str, ...]
    header: re.Pattern[str]
    """From the end of the call's first mark to the first argument; group `name`."""
    header_begin: re.Pattern[str]
    """Anything that `header` may still match."""
    key_begin: str
    key_end: str
    value_begin = ""
    value_ends: tuple[str, ...]
    """The first one is the proper end; one that begins an argument or ends the call is left for the next state."""
    call_ends: tuple[str, ...]
    trims_newlines = False
    untyped: tuple[str, ...]
    """Types of an argument that the schema does not have; none: any JSON, else a text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._properties: Mapping[str, Any] = {}
        self._key = ""
        self._is_text = False
        self._value = ""

    def _content(self, found: Found, final: bool) -> bool:
        hit = self._buffer.find(self.begins)
        if hit is None:
            before, _ = self._buffer.take_before(self.begins, final=final)
            self._show(found, before)
            return False
        self._show(found, self._buffer.take(hit[0]))
        if hit[1] == self.begins[0]:
            self._raw = self._buffer.take(len(hit[1]))
        self._state = self._header
        return True

    def _header(self, found: Found, final: bool) -> bool:
        match = self.header.match(self._buffer.text)
        if match is None and self._raw and self._buffer.text.lstrip().startswith("{"):
            self._state = self._json_call
            return True
        if match is None:
            broken = final or self.header_begin.fullmatch(self._buffer.text) is None
            return self._give_up(found) if broken else False
        self._begin_call(found, match["name"])
        self._properties = argument_schemas(self._schemas.get(match["name"]) or {})
        self._buffer.take(match.end())
        self._state = self._arguments
        return True

    def _json_call(self, found: Found, final: bool) -> bool:
        """A call as JSON, to which other models were trained."""
        end = self.call_ends[-1]
        if self._buffer.find((end,)) is None:
            return self._give_up(found) if final else False
        body, _ = self._buffer.take_before((end,), final=final)
        values = values_of(body) or repaired_values(body, complete=True)
        calls = self._read(values) if values else None
        if calls is None:
            self._show(found, self._raw + body + end)
        found.calls += calls or []
        self._raw, self._state = "", self._content
        return True

    def _arguments(self, found: Found, final: bool) -> bool:
        """Reads between arguments; other text is dropped."""
        _, mark = self._buffer.take_before((self.key_begin, *self.call_ends), final=final)
        if mark == self.key_begin:
            self._state = self._argument_name
        elif mark or final:
            self._add_arguments(found, "}" if self._has_arguments else "{}")
            self._end_call(found)
            self._state = self._after if mark else self._content
        return bool(mark)

    def _argument_name(self, found: Found, final: bool) -> bool:
        marks = (self.key_end,)
        hit = self._buffer.find(marks)
        if hit is None:
            return False
        name, _ = self._buffer.take_before(marks, final=final)
        self._key = name.strip()
        self._state = self._value_begin
        return True

    def _value_begin(self, found: Found, final: bool) -> bool:
        if self.value_begin:
            hit = self._buffer.find((self.value_begin, *self.call_ends))
            if hit is None:
                return False
            if hit[1] != self.value_begin:  # a name without a value
                self._state = self._arguments
                return True
            self._buffer.take(hit[0] + len(hit[1]))
        if self.trims_newlines:
            if not self._buffer.text and not final:
                return False
            if self._buffer.text.startswith("\n"):
                self._buffer.take(1)
        self._is_text = self._types() == {"string"}
        self._value = ""
        self._state = self._argument
        if self._is_text:
            self._add_arguments(found, self._name_of_argument() + '"')
        return True

    def _argument(self, found: Found, final: bool) -> bool:
        hit = self._buffer.find(self.value_ends)
        before, mark = self._buffer.take_before(self.value_ends, final=final)
        if self._is_text:
            self._add_arguments(found, json.dumps(before, ensure_ascii=False)[1:-1] + ('"' if mark else ""))
        else:
            self._value += before
        if hit is None:
            return False
        if not self._is_text:
            value = json.dumps(converted(self._value, self._types()), ensure_ascii=False)
            self._add_arguments(found, self._name_of_argument() + value)
        if mark.strip() != self.value_ends[0]:
            self._buffer.put_back(mark)
        self._state = self._arguments
        return True

    def _after(self, found: Found, final: bool) -> bool:
        """Takes the mark after a call that closes what the first one opened."""
        self._buffer.skip_space()
        end = self.call_ends[-1]
        if self._buffer.text.startswith(end):
            self._buffer.take(len(end))
        elif not final and self._buffer.may_become(end):
            return False
        self._state = self._content
        return bool(self._buffer.text)

    def _name_of_argument(self) -> str:
        return ("{" if not self._has_arguments else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _types(self) -> set[str]:
        return types_of(self._properties.get(self._key)) or set(self.untyped)


class QwenCoderCalls(XmlCalls):
    """Qwen3-Coder, Qwen3-Next and later: <tool_call><function=name><parameter=key>value</parameter></function>."""

    begins = ("<tool_call>", "<function=")
    header = re.compile(r"\s*<function=(?P<name>[^>\s]+)\s*>")
    header_begin = re.compile(r"\s*+(<(f[^>\n]{0,256})?)?")
    key_begin, key_end = "<parameter=", ">"
    value_ends = ("</parameter>", "\n</parameter>", "\n<parameter=", "\n</function>")
    call_ends = ("</function>", "</tool_call>")
    trims_newlines = True
    untyped = ("string",)
    marks = ("<tool_call>", "</tool_call>")


class Glm45Calls(XmlCalls):
    """GLM-4.5 and later: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>."""

    begins = ("<tool_call>",)
    header = re.compile(r"\s*(?P<name>[^\s<]+)\s*(?=<arg_key>|</tool_call>)")
    header_begin = re.compile(r"\s*+([^\s<]{0,256}\s*(<[^>]{0,16})?)?")
    key_begin, key_end = "<arg_key>", "</arg_key>"
    value_begin, value_ends = "<arg_value>", ("</arg_value>",)
    call_ends = ("</tool_call>",)
    untyped = ()
    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def _after(self, found: Found, final: bool) -> bool:
        self._state = self._content
        return bool(self._buffer.text)


def argument_schemas(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of a function's arguments, each of which can stand by itself."""
    whole = referenced(schema, schema.get("$ref"))
    if isinstance(whole, Mapping):
        schema = {**schema, **whole}
    properties = schema.get("properties")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if schema.get(key)}
    found = {}
    for name, each in properties.items() if isinstance(properties, Mapping) else ():
        target = referenced(schema, each.get("$ref")) if isinstance(each, Mapping) else None
        own = target if isinstance(target, Mapping) else each
        found[name] = {**own, **definitions} if isinstance(own, Mapping) else own
    return found
