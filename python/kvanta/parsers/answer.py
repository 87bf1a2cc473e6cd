"""A chat's answer taken apart: the parsers of a server's model, and their state for each text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvanta.constraints.reasoning_gate import ReasoningGate
from kvanta.constraints.thinking_budget import Thinking, thinking_marks
from kvanta.params.structured_outputs import StructuredOutputsParams
from kvanta.parsers import harmony
from kvanta.parsers.call_reader import CallReader, Found, TextReader
from kvanta.parsers.call_tags import constrain_calls
from kvanta.parsers.harmony import HARMONY_PARSER, HarmonyReader
from kvanta.parsers.reasoning import (
    HARMONY,
    Begin,
    ReasoningCount,
    ReasoningFormat,
    ReasoningReader,
    ThinkReader,
    first_state,
    reasoning_format,
)
from kvanta.parsers.tool_calls import PARSERS, make_reader
from kvanta.parsers.tools import Tools
from kvanta.text.tokenizer import Tokenizer


class PlainText(CallReader):
    """A text without calls and reasoning."""

    def take(self, text: str) -> Found:
        """Everything is content."""
        return Found(text)

    def end(self) -> Found:
        """Nothing is held back."""
        return Found()


class AnswerParsers:
    """`--tool-call-parser` and `--reasoning-parser` for one model."""

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "", reasoning_parser: str = "") -> None:
        """Names of PARSERS and FORMATS, or empty."""
        self.tokenizer = tokenizer
        reasoning = HARMONY if tool_parser == HARMONY_PARSER else reasoning_format(reasoning_parser, tokenizer)
        self.reasoning: ReasoningFormat | None = reasoning
        self.tool_parser = HARMONY_PARSER if reasoning is HARMONY and not tool_parser else tool_parser

    @property
    def knows_thinking(self) -> bool:
        """Reasoning can be told from the answer, and so limited."""
        return self.reasoning is not None or thinking_marks(self.tokenizer) is not None

    def thinking(self, reasoning: ReasoningFormat, reader: ReasoningReader, prompt: str) -> Thinking:
        """The reasoning of a text that `reader` reads from its beginning."""
        tokenizer = self.tokenizer
        marks = {token for mark in reasoning.marks if (token := tokenizer.token_id(mark)) is not None}
        end = tokenizer.encode(reasoning.ending, add_special_tokens=False)
        begun = None if reasoning.is_harmony or reader.in_content else reasoning.unfinished(prompt)
        return Thinking(reader, end, marks, len(tokenizer.encode(begun or "", add_special_tokens=False)))

    def shown(self, tools: Tools) -> frozenset[int]:
        """Special tokens that the text must show, because they are marks."""
        marks = set(self.reasoning.marks if self.reasoning else ())
        if tools.may_call and self.tool_parser:
            marks.update(getattr(PARSERS[self.tool_parser], "marks", ()))
        return frozenset(token for mark in marks if (token := self.tokenizer.token_id(mark)) is not None)


@dataclass(frozen=True)
class ContinuationShape:
    """Plain continuation of a prompt: reasoning may be limited, and the text is not parsed."""

    parsers: AnswerParsers
    shown: frozenset[int] = frozenset()

    def gate(self, prompt: str) -> None:
        """The whole text is the grammar's."""

    def thinking(self, prompt: str) -> Thinking | None:
        """Reasoning as AnswerShape's: from the prompt's mark, or from one in the text itself."""
        reasoning = self.parsers.reasoning
        if reasoning is None:
            return None
        reader: ReasoningReader = ThinkReader(
            reasoning, Begin.EITHER if reasoning.unfinished(prompt) is None else Begin.REASONING
        )
        if reasoning.is_harmony:
            reader = HarmonyReader()
            reader.prime(prompt)
        return self.parsers.thinking(reasoning, reader, prompt)


@dataclass(frozen=True)
class AnswerShape:
    """The parsers for one request."""

    parsers: AnswerParsers
    tools: Tools
    variables: Mapping[str, Any]
    continues: bool
    """The prompt ends within the answer."""
    structured_outputs: StructuredOutputsParams | None = None
    """The constraint of the text, with that of the calls that the model decides to make."""
    free: bool = False
    """The text around calls has no constraint."""

    @classmethod
    def read(
        cls,
        parsers: AnswerParsers,
        tools: Tools,
        variables: Mapping[str, Any],
        continues: bool = False,
        given: StructuredOutputsParams | None = None,
    ) -> AnswerShape:
        """`given`: the constraint that the request gives to the text. Raises InputError for bad tools."""
        return cls(
            parsers,
            tools,
            variables,
            continues,
            constrain_calls(tools, parsers.tool_parser, given),
            free=given is None and not tools.forced,
        )

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that the text must show."""
        return self.parsers.shown(self.tools)

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens that end the text, whatever the model's configuration says: files of GPT-OSS may leave one out."""
        tokenizer = self.parsers.tokenizer
        ends = harmony.STOPS if self.parsers.reasoning is HARMONY else ()
        return [token for end in ends if (token := tokenizer.token_id(end)) is not None]

    def reader(self, prompt: str) -> TextReader:
        """Reader of one text of the answer."""
        reasoning = self.parsers.reasoning
        inner = make_reader(self.tools, "" if reasoning is HARMONY else self.parsers.tool_parser)
        return inner or PlainText() if reasoning is None else self._reasoning_reader(reasoning, prompt, inner)

    def gate(self, prompt: str) -> ReasoningGate | None:
        """Gate of one text's grammar, which begins where the reasoning ends; None: at once."""
        reasoning, tokenizer = self.parsers.reasoning, self.parsers.tokenizer
        if reasoning is None or self.free:  # a call may begin in the reasoning
            return None
        reader = self._reasoning_reader(reasoning, prompt, None)
        may_begin = None
        if not reasoning.is_harmony and reader.in_content:
            if self._begin(reasoning, prompt) is Begin.CONTENT:
                return None
            may_begin = tokenizer.token_id(reasoning.start)
        # Calls of GPT-OSS end the text without a final message.
        return ReasoningGate(reader, tokenizer.token_text, may_begin=may_begin, may_end=reasoning.is_harmony)

    def thinking(self, prompt: str) -> Thinking | None:
        """The reasoning of one text, which a budget may limit; None where there is none to tell apart."""
        reasoning = self.parsers.reasoning
        if reasoning is None:
            return None
        return self.parsers.thinking(reasoning, self._reasoning_reader(reasoning, prompt, None), prompt)

    def count(self, prompt: str) -> ReasoningCount | None:
        """Counter of one text's reasoning; None if it has no reasoning to count."""
        reasoning = self.parsers.reasoning
        if reasoning is None:
            return None
        return ReasoningCount(self._reasoning_reader(reasoning, prompt, None), self.parsers.tokenizer, reasoning)

    def _begin(self, reasoning: ReasoningFormat, prompt: str) -> Begin:
        return first_state(reasoning, prompt, self.variables, continues=self.continues)

    def _reasoning_reader(self, reasoning: ReasoningFormat, prompt: str, inner: CallReader | None) -> ReasoningReader:
        if not reasoning.is_harmony:
            calls = self.tools.may_call and inner is not None
            return ThinkReader(reasoning, self._begin(reasoning, prompt), inner, ends_at_calls=calls)
        tools = self.tools
        may_call = tools.may_call or tools.forced
        reader = HarmonyReader(inner=inner, may_call=may_call, parallel=tools.parallel, schemas=tools.schemas)
        reader.prime(prompt)
        return reader
