"""Regular expressions that end a text (`stop_regex` of SGLang), searched with the automata of llguidance.

A pattern is never matched again from the beginning, whatever it is: a byte of text costs about a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvanta.constraints.structured_output import need_llguidance
from kvanta.errors import InputError
from kvanta.params.checks import one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher


class StopPatterns:
    """Compiled patterns, which the texts of a request share. Compiling may take some milliseconds.

    Syntax: that of Rust's crate regex without look-around; `$` only at the end of a pattern, where it has no effect,
    because a text ends as soon as a pattern matches. Raises InputError for a pattern that cannot be used.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = list(patterns)
        self._automata = [_automaton(pattern) for pattern in self.patterns]

    def search(self) -> StopSearch:
        """A search in one text."""
        return StopSearch(self.patterns, [automaton.deep_copy() for automaton in self._automata])


class StopSearch:
    """Finds the end of the first match in a text that grows."""

    def __init__(self, patterns: Sequence[str], automata: Sequence[LLMatcher]) -> None:
        self._automata = list(zip(patterns, automata, strict=True))
        self.found: str | None = None
        """The pattern that has matched."""

    def add(self, text: str, final: bool = False) -> str:
        """The text up to the end of the first match, nothing after it. Raises InputError for a pattern too complex.

        `final`: has no effect, since no text is held back.
        """
        del final
        if self.found is not None:
            return ""
        for end, character in enumerate(text, 1):
            data = list(character.encode(errors="replace"))
            for pattern, automaton in self._automata:
                if not automaton.consume_tokens(data):
                    raise InputError(
                        f"stop_regex has {one_line(pattern)}, which is too complex for this text", "stop_regex"
                    )
                if automaton.is_accepting():
                    self.found = pattern
                    return text[:end]
        return text


def _automaton(pattern: str) -> LLMatcher:
    need_llguidance("stop_regex")
    if _matcher(pattern, pattern).is_accepting():
        raise InputError(f"stop_regex has {one_line(pattern)}, which matches the empty text", "stop_regex")
    return _matcher(pattern, f"(?s:.*)(?:{pattern})")


def _matcher(pattern: str, expression: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(LLTokenizer("byte"), grammar_from("regex", expression), log_level=0, limits=limits)
    if matcher.is_error():
        message = matcher.get_error()
        reason = re.search(r"^error: (.*)", message, re.MULTILINE) or re.search(r"regex\): ([^;\n]*)", message)
        shown = reason[1] if reason else one_line(message, 200)
        raise InputError(f"stop_regex has {one_line(pattern)}: {shown}", "stop_regex")
    return matcher
