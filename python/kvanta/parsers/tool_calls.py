"""Syntaxes of tool calls: `--tool-call-parser`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvanta.errors import InputError
from kvanta.parsers.call_reader import CallReader, Found, TextReader
from kvanta.parsers.call_values import list_values, repaired_values, values_of
from kvanta.parsers.gemma_calls import Gemma4Calls
from kvanta.parsers.harmony import HarmonyReader
from kvanta.parsers.lenient_json import JSON_READER, LenientJson
from kvanta.parsers.mistral_calls import MistralCalls
from kvanta.parsers.section_calls import DeepSeekV3Calls, DeepSeekV31Calls, KimiK2Calls
from kvanta.parsers.text_buffer import overlap
from kvanta.parsers.tools import Tools
from kvanta.parsers.xml_calls import Glm45Calls, QwenCoderCalls


class HermesCalls(CallReader):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, or a list of such objects, amid text."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"
    marks = (_BEGIN, _END)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
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
            sure = len(self._held) - overlap(self._held, self._BEGIN)
            self._show(found, self._held[:sure])
            self._held = self._held[sure:]
        return found

    def end(self) -> Found:
        """A call without its end, too. After calls, one that is cut off is no text."""
        found = Found()
        if self._inside:
            self._add(found, self._held, "")
        elif not self._among_calls:
            self._show(found, self._held)
        self._show_blank(found)
        return found

    def _add(self, found: Found, body: str, end: str) -> None:
        values = values_of(body)
        calls = self._read(values) if values else None
        if calls is None:
            calls = self._repaired(body, complete=bool(end))
        if calls is not None:
            found.calls += calls
        elif end or not self._among_calls:
            self._show(found, self._BEGIN + body + end)

    def _repaired(self, body: str, *, complete: bool) -> list[dict[str, Any]] | None:
        """Calls in the syntax that other models were trained to, or in what is close to JSON."""
        for mark, end, syntax in _TAGGED:
            if mark in body:
                text = f"{self._BEGIN}{body}{self._END}"
                found = rest_of(syntax(schemas=self._schemas), text) if complete or end in body else Found()
                named = [call["function"] for call in found.calls]
                return [new for each in named for new in self._new(each["name"], each["arguments"])] if named else None
        values = repaired_values(body, complete=complete)
        return self._read(values) if values else None


_TAGGED = (("<function=", "</function>", QwenCoderCalls), ("<arg_key>", "</arg_value>", Glm45Calls))


class JsonCalls(CallReader):
    """{"name": ..., "parameters": {...}}, several with semicolons between, or a list: the whole text, or none of it."""

    _BEGINNINGS = ("{", "[", "<|python_tag|>")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: list[str] = []
        self._is_json: bool | None = None
        """True for JSON; None: unknown until more text has come."""

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
        text = "".join(self._held).strip().removeprefix(self._BEGINNINGS[-1])
        values = values_of(text) or (repaired_values(text, complete=False) if self._is_json else [])
        calls = self._read(values) if values and all(map(self._may_be_call, values)) else None
        return Found(calls=calls) if calls else self._rest()

    def _may_be_call(self, value: Any) -> bool:
        """Other JSON may have a name, too."""
        return isinstance(value, Mapping) and (
            bool(value.keys() & {"arguments", "parameters"}) or value.get("name") in self._schemas
        )

    def _rest(self) -> Found:
        text, self._held = "".join(self._held), []
        return Found(text)


class RequiredCalls(CallReader):
    """A list of {"name", "parameters"}, which structured output holds the whole text to.

    Of a text that is cut off, the calls that are complete; without one it stays text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._held: list[str] = []

    def take(self, text: str) -> Found:
        """Nothing before the end."""
        self._held.append(text)
        return Found()

    def end(self) -> Found:
        """All calls."""
        text = "".join(self._held)
        calls = self._read(list_values(text))
        return Found(calls=calls) if calls else Found(text)


class NamedCall(CallReader):
    """The text is the arguments of one function. One that is cut off is no call, and stays text."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._held: list[str] = []

    def take(self, text: str) -> Found:
        """Nothing before the end: a client may run what has begun."""
        self._held.append(text)
        return Found()

    def end(self) -> Found:
        """The call."""
        text = "".join(self._held)
        try:
            JSON_READER.decode(text)
        except (ValueError, RecursionError):
            return Found(text)
        return Found(calls=self._new(self._name, text))


Parser = Callable[..., CallReader]
PARSERS: Mapping[str, Parser] = {
    "deepseek_v3": DeepSeekV3Calls,
    "deepseek_v31": DeepSeekV31Calls,
    "gemma4": Gemma4Calls,
    "glm45": Glm45Calls,
    "hermes": HermesCalls,
    "kimi_k2": KimiK2Calls,
    "llama3_json": JsonCalls,
    "mistral": MistralCalls,
    "openai": HarmonyReader,
    "qwen3_coder": QwenCoderCalls,
}
"""Parsers by vLLM's names; SGLang's are aliases."""
_ALIASES: Mapping[str, str] = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "glm47": "glm45",
    "gpt-oss": "openai",
    "gpt_oss": "openai",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}


def parser_name(name: str) -> str:
    """The name in PARSERS. Raises InputError for an unknown one."""
    known = _ALIASES.get(name, name)
    if known and known not in PARSERS:
        raise InputError(f"{name!r} is none of {', '.join([*PARSERS, *_ALIASES])}")
    return known


def make_reader(tools: Tools, parser: str) -> CallReader | None:
    """Reader of one text of an answer; None if the text has no calls. `parser`: a name of PARSERS, or empty."""
    if tools.named:
        return NamedCall(tools.choice)
    if tools.forced:
        return RequiredCalls(parallel=tools.parallel)
    return PARSERS[parser](parallel=tools.parallel, schemas=tools.schemas) if tools.may_call and parser else None


def rest_of(reader: TextReader, text: str) -> Found:
    """The last of a text, which may be all of it."""
    found = reader.take(text)
    found.add(reader.end())
    return found


def whole_of(reader: TextReader, text: str, *, ended: bool) -> Found:
    """All of a text. `ended`: the model has ended it; else a call at its end may be cut off, and is left out."""
    found = rest_of(reader, text)
    if found.calls:
        function = found.calls[-1]["function"]
        try:
            JSON_READER.decode(function["arguments"])
        except (ValueError, RecursionError):
            function["arguments"] = LenientJson().take(function["arguments"], final=True) or "{}"
            if not ended:
                found.calls.pop()
    return found
