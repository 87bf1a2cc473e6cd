"""Grammars of texts with tagged parts, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvanta.params.structural_tag import (
    MAX_CALLS,
    Choice,
    Json,
    ListOf,
    Maybe,
    OneOf,
    Part,
    StructuralTag,
    Tag,
    TextUntil,
)

# Between tags that stand alone. Without a bound a weak model would go on with white space for ever.
_SPACE = r"/[ \t\r\n]{0,4}([;,][ \t\r\n]{0,4})?/"
# Texts that are arguments, likewise.
_WORDS = r"/(\s{0,256}\S)*\s{0,256}/"


def lark_grammar(
    tags: StructuralTag,
    special: Mapping[str, int],
    end_tokens: Collection[int],
    schema: Callable[[str | Mapping[str, Any]], str],
) -> str:
    """Grammar in llguidance's dialect. `special`: texts of the special tokens, which no other tokens can spell.

    `schema`: writes a schema as JSON. Special tokens that begin no tag may stand in the text between the tags.
    """
    grammar = _Grammar(special, end_tokens, schema)
    for tag in tags.tags:
        grammar.add(tag)
    every = " | ".join([*grammar.tags, *grammar.last_tags])
    if tags.instead is not None:
        calls = f"({every})" + ("" if tags.at_most_one else f"{{1,{MAX_CALLS}}}")
        begin, end = map(grammar.part, tags.section)
        section = (f"({begin})?" if begin else "", calls, f"(SPACE {end})?" if end else "")
        start = f"{' '.join(section)} | {grammar.part(tags.instead)}"
    else:
        others = grammar.special_between(grammar.first_tokens)
        last = " | ".join(["TEXT", *grammar.last_tags])
        between = f"({' | '.join(others)})*" if others else ""
        if tags.at_most_one:
            start = f"{between} ({every if tags.at_least_one else f'{every} | TEXT'})"
        else:
            start = f"({' | '.join([*others, *grammar.tags])})* ({last})"
            if tags.at_least_one:
                start = f"{between} ({every}) {start}"
    return "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", f"SPACE: {_SPACE}", f"WORDS: {_WORDS}", *grammar.rules])


class _Grammar:
    """The rules of the tags."""

    def __init__(
        self,
        special: Mapping[str, int],
        end_tokens: Collection[int],
        schema: Callable[[str | Mapping[str, Any]], str],
    ) -> None:
        self.rules: list[str] = []
        self.tags: list[str] = []
        self.last_tags: list[str] = []
        """Tags whose last token ends the text."""
        self.first_tokens: set[int] = set()
        self._special = special
        self._end_tokens = frozenset(end_tokens)
        self._schema = schema
        marks = sorted(filter(None, special), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._heads: dict[tuple[str, bool], str] = {}

    def add(self, tag: Tag) -> None:
        """A rule for the tag."""
        key = tag.trigger, tag.alone
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self._before("SPACE" if tag.alone else "TEXT", tag.trigger)
            first = self._marks.match(tag.trigger)
            if first:
                self.first_tokens.add(self._special[first[0]])
        last = tag.parts[-1]
        ends = isinstance(last, str) and self._special.get(last) in self._end_tokens
        parts = map(self.part, tag.parts[:-1] if ends else tag.parts)
        (self.last_tags if ends else self.tags).append(self._rule(" ".join(filter(None, [head, *parts]))))

    def special_between(self, without: Collection[int]) -> list[str]:
        """Text up to a special token other than these and those that end the text; none where there is no other."""
        tokens = set(self._special.values()).difference(without, self._end_tokens)
        return [f"TEXT <[{_ranges(tokens)}]>"] if tokens else []

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"rule{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def part(self, part: Part) -> str:
        """Its expression."""
        match part:
            case Json(schema):
                return f"%json {self._schema(schema)}"
            case TextUntil(mark, plain):
                return self._before("WORDS", mark) if plain else self._until(mark)
            case OneOf(texts):
                every = " | ".join(filter(None, map(self._literal, texts)))
                return f"({every})" + ("?" if "" in texts else "")
            case ListOf(entry):
                one = " ".join(map(self.part, entry))
                return f'"[" ({one} ("," {one})*)? "]"'
            case Choice(choices):
                return "(" + " | ".join(" ".join(map(self.part, parts)) for parts in choices) + ")"
            case Maybe(parts):
                return f"({' '.join(map(self.part, parts))})?"
        return self._literal(part)

    def _until(self, mark: str) -> str:
        """Any text up to the first place of the mark, and the mark; special tokens may stand in the text."""
        first = self._marks.match(mark)
        others = self.special_between([self._special[first[0]]] if first else [])
        return " ".join([*(f"({each})*" for each in others), self._before("WORDS", mark)])

    def _before(self, text: str, mark: str) -> str:
        """The terminal `text` up to the first place of the mark, and the mark."""
        first = self._marks.search(mark)
        at = first.start() if first else len(mark)
        if at == 0:
            return f"{text} {self._literal(mark)}"
        return f"{self._rule(f'{text} {_quoted(mark[:at])}', '[lazy]')} {self._literal(mark[at:])}".rstrip()

    def _literal(self, words: str) -> str:
        """Expression of a text; its special tokens are tokens."""
        pieces: list[str] = []
        at = 0
        for mark in self._marks.finditer(words):
            pieces += [_quoted(words[at : mark.start()]), f"<[{self._special[mark[0]]}]>"]
            at = mark.end()
        return " ".join(filter(None, [*pieces, _quoted(words[at:])]))


def _quoted(words: str) -> str:
    return json.dumps(words, ensure_ascii=False) if words else ""


def _ranges(numbers: Collection[int]) -> str:
    """Numbers written as "1,3-7"."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(begin) if begin == end else f"{begin}-{end}" for begin, end in ranges)
