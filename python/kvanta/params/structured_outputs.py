"""Constraints of a text: JSON, a regular expression, a choice, a grammar, tagged parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line, text, truth
from kvanta.params.structural_tag import StructuralTag

MAX_CHOICES = 2**14
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """The constraint of a text: exactly one of these, named as in vLLM's class. Raises InputError, whose field is
    one of these.

    The model's end token ends the text where it is complete, even with ignore_eos or before min_tokens; a text that
    max_tokens or a stop string ends may be incomplete (finish_reason tells).
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a text or as an object."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Syntax of Rust's crate regex (no look-around, no back references); the whole text must match."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Lark (rule `start`, of llguidance's dialect) or GBNF (rule `root`, of llama.cpp)."""
    structural_tag: str | Mapping[str, Any] | StructuralTag | None = None
    """Any text, in which JSON of a schema follows certain words: {"structures": [{"begin", "schema", "end"}],
    "triggers"}, as a text or as an object.
    """
    disable_additional_properties: bool | None = None
    """False: objects of the schema may have properties that it does not list. None: as StructuredOutputsConfig says."""
    disable_any_whitespace: bool | None = None
    """True: JSON without spaces between its parts. None: as StructuredOutputsConfig says."""
    whitespace_pattern: str | None = None
    """Regular expression of the space between the parts of JSON. None: as StructuredOutputsConfig says."""

    def __post_init__(self) -> None:
        """Checks types; the grammar itself is checked by GrammarCompiler."""
        self.json_object = truth("json_object", self.json_object)
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise InputError(f"json must be a JSON schema as a text or an object, got {one_line(self.json)}", "json")
        given = self._given()
        if len(given) != 1:
            names = ", ".join(KINDS)
            message = f"structured_outputs has {' and '.join(given) or 'nothing'}: one of {names} is needed"
            raise InputError(message, "structured_outputs")
        for name in ("disable_additional_properties", "disable_any_whitespace"):
            if getattr(self, name) is not None:
                setattr(self, name, truth(name, getattr(self, name)))
        if self.whitespace_pattern is not None:
            text("whitespace_pattern", self.whitespace_pattern)
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                text(name, getattr(self, name))
        if self.choice is not None:
            if isinstance(self.choice, str) or not isinstance(self.choice, Sequence) or not self.choice:
                raise InputError(f"choice must be a list of texts, got {one_line(self.choice)}", "choice")
            if len(self.choice) > MAX_CHOICES:
                raise InputError(f"choice must have at most {MAX_CHOICES} texts, got {len(self.choice)}", "choice")
            with about("choice"):
                self.choice = [text("an entry of choice", entry) for entry in self.choice]
        if self.structural_tag is not None and not isinstance(self.structural_tag, StructuralTag):
            with about("structural_tag"):
                self.structural_tag = StructuralTag.read(self.structural_tag)

    @property
    def kind(self) -> str:
        """The field that is given."""
        return self._given()[0]

    @property
    def schemas(self) -> list[str | Mapping[str, Any]]:
        """The JSON schemas in it."""
        if isinstance(self.structural_tag, StructuralTag):
            return self.structural_tag.schemas
        return [] if self.json is None else [self.json]

    def _given(self) -> list[str]:
        return [name for name in KINDS if getattr(self, name) not in (None, False)]
