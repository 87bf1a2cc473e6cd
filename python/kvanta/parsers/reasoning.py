"""Reasoning in a model's text, apart from its answer: `--reasoning-parser`.

Most models write it between two marks; the first one may stand in the prompt. GPT-OSS has channels (harmony.py).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvanta.errors import InputError
from kvanta.parsers import harmony
from kvanta.parsers.call_reader import CallReader, Found, TextReader
from kvanta.parsers.text_buffer import TextBuffer, pieces
from kvanta.text.tokenizer import Tokenizer


class ReasoningReader(TextReader, Protocol):
    """Tells reasoning from the rest."""

    @property
    def in_reasoning(self) -> bool:
        """True while the text that comes is reasoning."""

    @property
    def in_content(self) -> bool:
        """True while the text that comes is the answer."""


class Begin(enum.Enum):
    """The beginning of a text, unless the prompt shows another one."""

    REASONING = "reasoning"
    EITHER = "either"
    CONTENT = "content"


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks of a family of models. `is_harmony`: channels, without the rest."""

    start: str = "<think>"
    end: str = "</think>"
    begin: Begin = Begin.REASONING
    switches: tuple[str, ...] = ()
    """Variables of the chat template that turn reasoning on and off."""
    is_harmony: bool = False
    label: str = ""
    """Optional text after the start that is not reasoning."""
    repeats: bool = False
    """Reasoning may come again within the answer."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the text must show."""
        return harmony.MARKS if self.is_harmony else (self.start, self.end)

    @property
    def ending(self) -> str:
        """The text with which reasoning ends and the answer begins."""
        return harmony.FINAL if self.is_harmony else self.end

    def unfinished(self, prompt: str) -> str | None:
        """The reasoning that a prompt begins without ending it; None if there is none."""
        _, start, begun = prompt.rpartition(self.start)
        return begun.removeprefix(self.label) if start and self.end not in begun else None


HARMONY = ReasoningFormat(is_harmony=True)
FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(),
    "deepseek_v3": ReasoningFormat(begin=Begin.CONTENT, switches=("thinking", "enable_thinking")),
    "gemma4": ReasoningFormat("<|channel>", "<channel|>", Begin.EITHER, label="thought\n", repeats=True),
    "glm45": ReasoningFormat(switches=("thinking", "enable_thinking")),
    "kimi_k2": ReasoningFormat(switches=("thinking",)),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", Begin.EITHER),
    "openai_gptoss": HARMONY,
    "qwen3": ReasoningFormat(switches=("enable_thinking",)),
}
"""Formats by vLLM's names; SGLang's are aliases."""
_ALIASES: Mapping[str, str] = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "glm47": "glm45",
    "gpt-oss": "openai_gptoss",
    "gpt_oss": "openai_gptoss",
    "qwen3-thinking": "qwen3",
}
# Marks of calls that end reasoning without its own mark. Reasoning may mention <tool_call> by itself.
_CALL_MARKS = (
    "<tool_call>\n<function=",
    "<tool_call><function=",
    "<tool_call>\n{",
    "<tool_call>{",
    "[TOOL_CALLS]",
    "<|tool_call>call:",
    "<|tool_call>:",
    "<|tool_calls_section_begin|>",
    "<｜tool▁calls▁begin｜>",  # noqa: RUF001
)


def format_name(name: str) -> str:
    """The name in FORMATS. Raises InputError for an unknown one."""
    known = _ALIASES.get(name, name)
    if known and known not in FORMATS:
        raise InputError(f"{name!r} is none of {', '.join([*FORMATS, *_ALIASES])}")
    return known


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """The format of a name, which may be empty, for the tokens that the model has.

    A vocabulary with the marks of channels is GPT-OSS, whose text nobody can read otherwise.
    """
    if not name:
        return HARMONY if all(tokenizer.token_id(mark) is not None for mark in harmony.MARKS) else None
    reasoning = FORMATS[name]
    if name == "mistral" and tokenizer.token_id(reasoning.start) is None:  # the first Magistral wrote the marks as text
        reasoning = dataclasses.replace(reasoning, start="<think>", end="</think>")
    return reasoning


class ThinkReader:
    """Reasoning between two marks, then content, which `inner` reads if it is given."""

    def __init__(
        self,
        reasoning: ReasoningFormat,
        begin: Begin,
        inner: CallReader | None = None,
        *,
        ends_at_calls: bool = False,
    ) -> None:
        """`begin`: REASONING may come with its mark or without. `ends_at_calls`: a call needs no mark before it."""
        self._start, self._label, self._inner = reasoning.start, reasoning.label, inner
        self._labels = (self._label, self._label.rstrip() + reasoning.end) if self._label else ("",)
        self._begin_marks = (reasoning.start, reasoning.end) if reasoning.repeats else (reasoning.start,)
        self._after = Begin.EITHER if reasoning.repeats else Begin.CONTENT
        self._ends = (reasoning.end, *(_CALL_MARKS if ends_at_calls else ()))
        self._reasoning_marks = (*self._ends, reasoning.start) if reasoning.repeats else self._ends
        self._buffer = TextBuffer()
        self._state = self._after if begin is Begin.CONTENT else begin
        self._at_start = self._at_label = begin is Begin.REASONING

    @property
    def calls(self) -> int:
        """Calls in the content."""
        return self._inner.calls if self._inner else 0

    @property
    def in_reasoning(self) -> bool:
        """True from the beginning, or from the first mark and its label, to the second one."""
        return self._state is Begin.REASONING and not (self._at_label and self._label)

    @property
    def in_content(self) -> bool:
        """True after the second mark, and before the first one if the text need not begin with it."""
        return self._state is not Begin.REASONING

    def take(self, text: str) -> Found:
        """The parts that are certain."""
        found = Found()
        for piece in pieces(text):
            self._buffer.add(piece)
            while self._step(found, final=False):
                pass
        return found

    def end(self) -> Found:
        """The rest."""
        found = Found()
        while self._step(found, final=True):
            pass
        if self._inner is not None:
            found.add(self._inner.end())
        return found

    def _step(self, found: Found, *, final: bool) -> bool:
        if self._state is Begin.CONTENT:
            self._pass_on(found, self._buffer.take())
            return False
        if self._state is Begin.EITHER:
            before, mark = self._buffer.take_before(self._begin_marks, final=final)
            self._pass_on(found, before)
            if mark == self._start:  # an end without a beginning shows nothing
                self._state, self._at_label = Begin.REASONING, True
            return bool(mark)
        if self._at_start:
            return self._skip_start(final=final)
        if self._at_label:
            return self._skip_label(final=final)
        before, mark = self._buffer.take_before(self._reasoning_marks, final=final)
        found.reasoning += before
        if mark == self._start:  # once more
            self._at_label = True
        elif mark:
            self._state = self._after
            self._buffer.put_back("" if mark == self._ends[0] else mark)
        return bool(mark)

    def _skip_start(self, *, final: bool) -> bool:
        text = self._buffer.text.lstrip()
        if text.startswith(self._start):
            self._buffer.take(len(self._buffer.text) - len(text) + len(self._start))
        elif not final and self._start.startswith(text):
            return False
        self._at_start = False
        return True

    def _skip_label(self, *, final: bool) -> bool:
        if self._buffer.text.startswith(self._label):
            self._buffer.take(len(self._label))
        elif self._buffer.text.startswith(self._labels[-1]):  # at once before the end
            self._buffer.take(len(self._label.rstrip()))
        elif not final and self._buffer.may_become(*self._labels):
            return False
        self._at_label = False
        return True

    def _pass_on(self, found: Found, text: str) -> None:
        if self._inner is None:
            found.content += text
        elif text:
            found.add(self._inner.take(text))


def first_state(reasoning: ReasoningFormat, prompt: str, variables: Mapping[str, Any], *, continues: bool) -> Begin:
    """The beginning of a text after this prompt. `continues`: the prompt ends within the answer itself."""
    tail = prompt.rstrip()
    if tail.endswith((reasoning.start, reasoning.start + reasoning.label.rstrip())):
        return Begin.REASONING
    if tail.endswith(reasoning.end):
        return Begin.CONTENT
    if continues:
        return Begin.REASONING if tail.rfind(reasoning.start) > tail.rfind(reasoning.end) else Begin.CONTENT
    given = [bool(variables[name]) for name in reasoning.switches if variables.get(name) is not None]
    if reasoning.begin is Begin.REASONING:
        return Begin.REASONING if not given or any(given) else Begin.CONTENT
    if reasoning.begin is Begin.CONTENT:
        return Begin.REASONING if any(given) else Begin.CONTENT
    return reasoning.begin


class ReasoningCount:
    """Counts the tokens of reasoning in one growing sequence, without the tokens of the marks."""

    def __init__(self, reader: ReasoningReader, tokenizer: Tokenizer, reasoning: ReasoningFormat) -> None:
        """`reader` has no other use: it is fed with single tokens."""
        self.tokens = 0
        self._reader = reader
        self._tokenizer = tokenizer
        self._marks = {tokenizer.token_id(mark) for mark in reasoning.marks}
        self._end_token = None if reasoning.is_harmony or reasoning.repeats else tokenizer.token_id(reasoning.end)
        self._read = 0
        self._ended = False

    def update(self, tokens: list[int]) -> int:
        """The number in all of `tokens`, of which there are more than at the last call."""
        while self._read < len(tokens) and not self._ended:
            if self.tokens and self._end_token is not None and self._reader.in_reasoning:
                self._skip_to_end(tokens)
                continue
            token = tokens[self._read]
            before = self._reader.in_reasoning
            self._reader.take(self._tokenizer.token_text(token))
            self.tokens += before and self._reader.in_reasoning and token not in self._marks
            self._read += 1
        return self.tokens

    def _skip_to_end(self, tokens: list[int]) -> None:
        """Reads all tokens up to the end of the reasoning at once."""
        assert self._end_token is not None
        try:
            end = tokens.index(self._end_token, self._read)
            self._ended = True
        except ValueError:
            end = len(tokens)
        self.tokens += end - self._read
        self._read = end
