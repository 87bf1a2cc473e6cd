"""Structured output: JSON, a regular expression, a choice, a grammar. The parsing is the package llguidance's.

    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "array"}), max_tokens=200)

A server keeps one GrammarCompiler, gives `TokenConstraint(compiler.matcher(params))` to Engine.add for every request,
and sets `config.set_fill_masks(fill_masks)` before it makes the engine; `LLM` does the same.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvanta import _core
from kvanta.constraints.json_schema import close_objects
from kvanta.constraints.loose_schema import loosened
from kvanta.constraints.reasoning_gate import GatedMatcher, ReasoningGate
from kvanta.constraints.structural_tag import lark_grammar
from kvanta.constraints.thinking_budget import Thinking, ThinkingBudget, thinking_of_vocabulary
from kvanta.constraints.token_mask import Matcher, TokenMask
from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.params.sampling_params import SamplingParams
from kvanta.params.structural_tag import StructuralTag
from kvanta.params.structured_outputs import MAX_CHOICES, StructuredOutputsParams
from kvanta.text.prompts import TokenPrompt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from kvanta.text.tokenizer import Tokenizer

_MAX_CHARACTERS = 2**18  # of a grammar: what is longer is not written by hand
_KEPT = 64  # compiled grammars
# Between two parts of a JSON text: a space, or a new line with its indentation. Without a bound a weak model would go
# on with spaces for ever.
_SPACE = r"( |\n[ ]{0,16}|\n\t{0,8})"


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """Settings of JSON texts for requests that do not give them (`--structured-outputs-config`)."""

    disable_additional_properties: bool = True
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def overrides(self, params: StructuredOutputsParams) -> JsonCompileOptions:
        """Options of llguidance for one request."""
        dense = params.disable_any_whitespace
        if self.disable_any_whitespace if dense is None else dense:
            return {
                "whitespace_flexible": False,
                "item_separator": ",",
                "key_separator": ":",
                "coerce_one_of": True,  # loosened() has named those for which that makes a difference
            }
        pattern = params.whitespace_pattern or self.whitespace_pattern or _SPACE
        return {"whitespace_pattern": pattern, "coerce_one_of": True}

    def closes(self, params: StructuredOutputsParams) -> bool:
        """Objects have the properties that the request's schema lists, and no others."""
        closed = params.disable_additional_properties
        return self.disable_additional_properties if closed is None else closed


class TextShape(Protocol):
    """The parts of a text, as far as generating it depends on them."""

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens that the text has in any case."""

    def gate(self, prompt: str) -> ReasoningGate | None:
        """Gate of one text's grammar, which begins where its reasoning ends; None: at once."""

    def thinking(self, prompt: str) -> Thinking | None:
        """The reasoning of one text; None if nothing is known of it."""


@dataclass(frozen=True)
class ConstraintRecipe:
    """Everything needed to build the masks of one text, except tokenizer and grammars."""

    prompt: TokenPrompt
    params: SamplingParams
    words: list[list[int]]
    """The tokens of bad_words."""
    shape: TextShape | None

    def matcher(self, tokenizer: Tokenizer, grammars: GrammarCompiler) -> Matcher:
        """The masks. Raises InputError for a grammar that cannot be used."""
        params, info = self.params, grammars.info
        structured_outputs, text = params.structured_outputs, self.prompt.text or ""
        gate = self.shape.gate(text) if self.shape else None
        matcher = None if structured_outputs is None else grammars.matcher(structured_outputs, gate)
        if matcher is None or self.words or params.allowed_token_ids:
            matcher = TokenMask(
                int(info.vocab),
                allowed=params.allowed_token_ids,
                banned=info.eos_token_ids if params.ignore_eos and structured_outputs is None else (),
                bad_words=self.words,
                inner=matcher,
            )
        if params.thinking_token_budget is None:
            return matcher
        thinking = (self.shape and self.shape.thinking(text)) or thinking_of_vocabulary(
            tokenizer, self.prompt.token_ids
        )
        return ThinkingBudget(params.thinking_token_budget, thinking, tokenizer, int(info.vocab), matcher)


class GrammarCompiler:
    """Makes constraints for the requests of one model. Threads may share it; a constraint may take seconds to make."""

    def __init__(
        self, tokenizer: Tokenizer, info: _core.ModelInfo, config: StructuredOutputsConfig | None = None
    ) -> None:
        self._config = config or StructuredOutputsConfig()
        self._tokenizer = tokenizer
        self.info = info
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()  # by grammar, at their beginning

    def prepare(self) -> None:
        """Reads the vocabulary, which the first constraint would do otherwise: other threads of Python stand still."""
        with contextlib.suppress(ImportError):
            self._read_vocabulary()

    def matcher(self, params: StructuredOutputsParams, gate: ReasoningGate | None = None) -> Matcher:
        """The state of one request, or of one of its `n` texts. Raises InputError when the grammar cannot be used; its
        field is the kind of `params`.

        `gate`: for one text, tells where its reasoning ends and the constraint begins.
        """
        need_llguidance("structured_outputs")
        with about(params.kind):
            grammar = _grammar(params, self._config, self._tokenizer, self.info)
        with self._lock:
            matcher = self._matchers.get(grammar)
        if matcher is None:
            matcher = self._matcher(grammar, params.kind)  # other threads may compile theirs, or copy, meanwhile
        with self._lock:
            matcher = self._matchers.setdefault(grammar, matcher)
            self._matchers.move_to_end(grammar)
            if len(self._matchers) > _KEPT:
                self._matchers.popitem(last=False)
            state = matcher.deep_copy()
        if gate is not None:
            info = self.info
            return GatedMatcher(state, gate, int(info.vocab), list(info.eos_token_ids))
        return state

    def constraint(self, matcher: Matcher, recipe: ConstraintRecipe) -> _core.TokenConstraint:
        """The constraint of a request of the engine. `recipe`: for engines in other processes."""
        del recipe
        return _core.TokenConstraint(matcher)

    def _matcher(self, grammar: str, kind: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        vocabulary = self._read_vocabulary()
        limits = LLParserLimits(verbose_errors=False)
        if kind == "choice":
            limits = LLParserLimits(verbose_errors=False, max_items_in_row=2 * MAX_CHOICES, step_max_items=2**20)
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # some grammars show only here that they are too large
        if matcher.is_error():
            raise InputError(f"{kind} cannot be used: {_line(matcher.get_error())}", kind)
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        """The bytes of every token as our own detokenizer has them, so that what was checked is what users see."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._vocabulary_lock:
            if self._vocabulary is None:
                vocabulary = _Vocabulary(self._tokenizer, self.info)
                self._vocabulary = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids)
            return self._vocabulary


def need_llguidance(field: str) -> None:
    """Raises InputError, which names the field, if the package is missing."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise InputError(
            f"{field} needs the package llguidance; install it with: pip install 'kvanta[structured]'", field
        ) from None


class _Vocabulary:
    """The vocabulary as llguidance's TokenizerWrapper reads it."""

    def __init__(self, tokenizer: Tokenizer, info: _core.ModelInfo) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.bytes[token] for token in range(info.vocab)]
        self.eos_token_ids = [token for token in info.eos_token_ids if 0 <= token < info.vocab]
        if not self.eos_token_ids:  # one that the model does not have: then nothing may follow a complete text
            self.eos_token_ids = [len(self.tokens)]
            self.tokens.append(b"")
        special = {*tokenizer.bytes.special, *self.eos_token_ids}
        self.special_token_ids = sorted(token for token in special if token < len(self.tokens))
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_id
        ordinary = [(data, token) for token, data in enumerate(self.tokens) if data and token not in special]
        self._ids = dict(reversed(ordinary))  # of equal bytes the first
        self._longest = max((len(data) for data in self._ids), default=0)

    def __call__(self, part: str) -> list[int]:
        """Token ids that spell exactly this text: masks would be wrong if they did not.

        As the model's own tokenizer has it, unless that adds something (SentencePiece: a space in front).
        """
        if not isinstance(part, str):
            raise TypeError("a text is needed")
        data = part.encode()
        ids = self._tokenizer.encode(part, add_special_tokens=False)
        if max(ids, default=0) < len(self.tokens) and b"".join(self.tokens[token] for token in ids) == data:
            return ids
        ids = []
        begin = 0
        while begin < len(data):
            ends = range(min(len(data), begin + self._longest), begin, -1)
            end = next((end for end in ends if data[begin:end] in self._ids), None)
            if end is None:
                raise ValueError(f"the vocabulary has no token for byte 0x{data[begin]:02x}")
            ids.append(self._ids[data[begin:end]])
            begin = end
        return ids


def fill_masks(states: list[Matcher], taken: list[list[int]], masks: NDArray[np.uint32]) -> list[Exception | None]:
    """Fills masks for one step of all constrained requests (EngineConfig.set_fill_masks); an error or None for each."""
    return [_fill_mask(*each) for each in zip(states, taken, masks, strict=True)]


def _fill_mask(matcher: Matcher, tokens: list[int], mask: NDArray[np.uint32]) -> Exception | None:
    try:
        if matcher.consume_tokens(tokens):
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint32)
            mask[:] = bits[: len(mask)]
        if not matcher.is_error():
            return None
        return InputError(f"structured_outputs: the grammar is too complex: {_line(matcher.get_error())}")
    except Exception as error:  # a defect of Kvanta; the other requests must go on
        return RuntimeError(f"{type(error).__name__}: {error}")


def _line(message: str) -> str:
    if message.startswith("panic"):  # and a backtrace
        return "the parser gave up"
    return " ".join(message.removesuffix("<non-verbose/>").split())[:300]


def _grammar(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, tokenizer: Tokenizer, info: _core.ModelInfo
) -> str:
    """The grammar in llguidance's language. Raises InputError for what is not a schema."""
    from llguidance import LLMatcher, grammar_from

    kind = params.kind
    given = getattr(params, kind)
    _check_length(kind, len(given) if isinstance(given, str) else sum(map(len, params.choice or ())))
    try:
        if kind in ("json", "json_object"):
            schema = _schema({"type": "object"} if params.json is None else params.json, params, config)
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=config.overrides(params))
        elif kind == "choice":
            texts = " | ".join(json.dumps(entry, ensure_ascii=False) for entry in params.choice or ())
            grammar = LLMatcher.grammar_from_lark(f"start: {texts}")
        elif kind == "structural_tag":
            grammar = LLMatcher.grammar_from_lark(_tagged(given, params, config, tokenizer, info))
        else:
            grammar = grammar_from("regex" if kind == "regex" else "grammar", given)
    except ValueError as error:
        raise InputError(f"{kind} cannot be used: {_line(str(error))}") from None
    _check_length(kind, len(grammar))
    return grammar


def _limited_json(schema: Mapping[str, Any]) -> str:
    """Ends where it becomes too long: a request's schema may have millions of values."""
    pieces = []
    size = 0
    for piece in json.JSONEncoder().iterencode(dict(schema)):
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_CHARACTERS:
            break
    return "".join(pieces)


def _check_length(kind: str, characters: int) -> None:
    if characters > _MAX_CHARACTERS:
        raise InputError(f"{kind} has {characters} characters or more; at most {_MAX_CHARACTERS} are read")


def _schema(
    given: str | Mapping[str, Any], params: StructuredOutputsParams, config: StructuredOutputsConfig, **more: Any
) -> str:
    """`more`: further fields, for llguidance alone."""
    try:
        text = given if isinstance(given, str) else _limited_json(given)
        _check_length(params.kind, len(text))
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise InputError(f"json must be a JSON schema (an object), got {one_line(text)}")
        schema, _ = loosened(schema)
        return json.dumps({**(close_objects(schema) if config.closes(params) else schema), **more})
    except InputError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{params.kind} is not a JSON schema: {_line(str(error))}") from None


def _tagged(
    tags: StructuralTag,
    params: StructuredOutputsParams,
    config: StructuredOutputsConfig,
    tokenizer: Tokenizer,
    info: _core.ModelInfo,
) -> str:
    options = {"x-guidance": config.overrides(params)}
    special = {tokenizer.token_text(token): token for token in tokenizer.bytes.special if token < info.vocab}
    return lark_grammar(tags, special, info.eos_token_ids, lambda schema: _schema(schema, params, config, **options))
