"""Sampling parameters: the fields and defaults of vLLM's SamplingParams, each declared once.

A field here is an argument of SamplingParams, an HTTP field of both endpoints and, with a help text, a flag of
`kvanta generate`. The engine receives every field that its C++ SamplingParams has.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvanta.errors import InputError
from kvanta.params.checks import one_line, real_number, text, truth, whole_number
from kvanta.params.fields import (
    INT32_MAX,
    Check,
    Parameters,
    check_output_kind,
    check_side,
    check_truncation,
    optional,
    parameter,
    unsupported,
    without_effect,
)
from kvanta.params.kv_cache_events import check_events
from kvanta.params.repetition import RepetitionDetectionParams
from kvanta.params.structured_outputs import StructuredOutputsParams

_FLOAT32_MAX = 3.4e38
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**14
MAX_SCORED_TOKENS = 128
MAX_PATTERNS = 32
MAX_PATTERN_CHARACTERS = 256


def _integer(low: int, high: int = INT32_MAX) -> Check:
    return lambda name, value: whole_number(name, value, low, high)


def _integer_or_none(low: int, high: int = INT32_MAX) -> Check:
    return optional(lambda name, value: whole_number(name, value, low, high, " or None"))


def _number(low: float, high: float, *, open_below: bool = False) -> Check:
    return lambda name, value: real_number(name, value, low, high, open_below=open_below)


def _texts(name: str, value: Any, most: int = MAX_STOPS, characters: int = MAX_STOP_CHARACTERS) -> list[str]:
    stops = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError(f"{name} must be a text or a list of texts that are not empty, got {one_line(value)}")
    if len(stops) > most:
        raise InputError(f"{name} must have at most {most} texts, got {len(stops)}")
    longest = max(map(len, stops), default=0)
    if longest > characters:
        raise InputError(f"{name} must have texts of at most {characters} characters, got one of {longest}")
    return stops


def _patterns(name: str, value: Any) -> list[str]:
    empty = isinstance(value, (str, list)) and not value
    patterns = [] if empty else _texts(name, value, MAX_PATTERNS, MAX_PATTERN_CHARACTERS)
    return [text(f"a pattern of {name}", pattern) for pattern in patterns]


def _stop(name: str, value: Any) -> str | list[str]:
    stops = _texts(name, value)
    return value if isinstance(value, str) else stops


def _token_ids(name: str, tokens: Sequence[Any], most: int) -> list[int]:
    if len(tokens) > most:
        raise InputError(f"{name} must have at most {most} token ids, got {len(tokens)}")
    return [whole_number(f"a token of {name}", token, 0, INT32_MAX) for token in tokens]


def _stop_tokens(name: str, value: Any) -> list[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputError(f"{name} must be a list of token ids or None, got {one_line(value)}")
    return _token_ids(name, list(value), MAX_STOP_TOKENS)


def _allowed_tokens(name: str, value: Any) -> list[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise InputError(f"{name} must be a list of token ids that is not empty, or None, got {one_line(value)}")
    return _token_ids(name, value, MAX_ALLOWED_TOKENS)


def _scored_tokens(name: str, value: Any) -> list[int] | None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputError(f"{name} must be a list of token ids or None, got {one_line(value)}")
    return _token_ids(name, list(value), MAX_SCORED_TOKENS) or None


def _budget(name: str, value: Any) -> int | None:
    return None if value == -1 else whole_number(name, value, 0, INT32_MAX, ", -1 or None")


def _seed(name: str, value: Any) -> int | None:
    return None if value == -1 else whole_number(name, value, 0, 2**64 - 1, ", -1 or None")


def _bad_words(name: str, value: Any) -> list[str]:
    return [] if isinstance(value, (list, tuple)) and not value else list(dict.fromkeys(_texts(name, value)))


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must map token ids to numbers or be None, got {one_line(value)}")
    return {
        whole_number(f"a token of {name}", token, 0, INT32_MAX): real_number(
            f"{name} of token {token}", bias, -_FLOAT32_MAX, _FLOAT32_MAX
        )
        for token, bias in value.items()
    }


def _structured_outputs(name: str, value: Any) -> StructuredOutputsParams:
    if not isinstance(value, StructuredOutputsParams):
        raise InputError(f"{name} must be StructuredOutputsParams or None, got {one_line(value)}")
    return value


def _repetition(name: str, value: Any) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams.read(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


@dataclass(kw_only=True)
class SamplingParams(Parameters):
    """Raises InputError, naming the field and its range, when a value is out of range or not supported."""

    n: int = parameter(1, _integer(1, 1024))
    """Texts per prompt; with a seed, text i uses seed + i."""
    max_tokens: int | None = parameter(16, _integer_or_none(1), help="maximum new tokens", metavar="N", common=True)
    """None: as many as the context holds."""
    min_tokens: int = parameter(0, _integer(0), help="new tokens before the model may stop", metavar="N")
    """No end-of-sequence or stop token is sampled, and no stop string searched, before."""
    temperature: float = parameter(
        1.0, _number(0.0, _FLOAT32_MAX), help="0: the most likely token", metavar="T", common=True
    )
    top_k: int = parameter(0, _integer(-1), help="sample from the K most likely tokens; 0 or -1: all", metavar="K")
    top_p: float = parameter(
        1.0, _number(0.0, 1.0), help="nucleus sampling, in [0, 1]; 0: the most likely token", metavar="P", common=True
    )
    min_p: float = parameter(
        0.0, _number(0.0, 1.0), help="minimum probability, as a share of the most likely token's", metavar="P"
    )
    repetition_penalty: float = parameter(
        1.0,
        _number(0.0, _FLOAT32_MAX, open_below=True),
        help="penalty of tokens in prompt and text; 1: none",
        metavar="X",
    )
    presence_penalty: float = parameter(
        0.0, _number(-2.0, 2.0), help="penalty of tokens in the text; 0: none", metavar="X"
    )
    frequency_penalty: float = parameter(
        0.0, _number(-2.0, 2.0), help="penalty of tokens in the text, per occurrence; 0: none", metavar="X"
    )
    seed: int | None = parameter(None, optional(_seed))
    """The same seed and prompt give the same tokens, whatever else is in the batch. None or, as in vLLM, -1: any."""
    stop: str | Sequence[str] | None = parameter(
        None, optional(_stop), help="end before any of these texts", metavar="TEXT", common=True
    )
    stop_token_ids: Sequence[int] | None = parameter(
        None, optional(_stop_tokens), help="end at any of these tokens", metavar="ID"
    )
    ignore_eos: bool = parameter(False, truth, help="go on after the model's end token")
    logit_bias: Mapping[int, float] | None = parameter(None, optional(_bias))
    """Added to the logits of these token ids, before the temperature."""
    allowed_token_ids: Sequence[int] | None = parameter(None, optional(_allowed_tokens))
    """Only these tokens are sampled. The model's end token is one of them only if it is listed."""
    bad_words: Sequence[str] | None = parameter(None, optional(_bad_words), help="texts not to write", metavar="TEXT")
    """Texts that are not written, as vLLM has it: their tokens, as at the beginning of a text and after a space, are
    not sampled in a row. Other spellings in tokens are not found. With either of the two, ignore_eos means that the end
    token is not sampled.
    """
    truncate_prompt_tokens: int | None = parameter(None, optional(check_truncation))
    """Keeps this many tokens of a longer prompt; -1: as many as fit the context together with max_tokens, or one."""
    truncation_side: str | None = parameter(None, optional(check_side))
    """The side that is cut off: "left" (None), or "right"."""
    logprobs: int | None = parameter(None, _integer_or_none(-1), http=False)
    """Log-probabilities of every new token: the chosen one's and those of this many most likely ones; -1: of all."""
    prompt_logprobs: int | None = parameter(None, _integer_or_none(-1))
    """The same for every prompt token but the first."""
    skip_special_tokens: bool = parameter(True, truth)
    """Special tokens are not part of the text."""
    include_stop_str_in_output: bool = parameter(False, truth)
    """The stop string, or the stop token's text, that ended the text is part of it."""
    structured_outputs: StructuredOutputsParams | None = parameter(None, optional(_structured_outputs), http=False)
    """The constraint of the text: JSON, a regular expression, a choice, a grammar."""

    stop_regex: str | Sequence[str] | None = parameter(
        None, optional(_patterns), help="end after the first match of any of these expressions", metavar="PATTERN"
    )
    """The match stays in the text, as SGLang's does. kvanta.constraints.stop_regex describes the syntax."""
    logprob_token_ids: Sequence[int] | None = parameter(None, optional(_scored_tokens))
    """Log-probabilities of every new token: the chosen one's and those of these tokens, instead of the likely ones."""
    thinking_token_budget: int | None = parameter(None, optional(_budget))
    """After this many tokens of reasoning its end is written. None or -1: no limit."""
    repetition_detection: RepetitionDetectionParams | None = parameter(None, optional(_repetition))
    """The text ends when it repeats itself, with the finish_reason "repetition"."""
    stream_interval: int | None = parameter(None, _integer_or_none(1))
    """New tokens in an event of a stream, at least, but for the first and the last."""
    detokenize: bool = parameter(True, truth)
    """False: token ids alone, no text."""
    flat_logprobs: bool = parameter(False, truth, http=False)
    """Log-probabilities are FlatLogprobs, which have few objects, however many tokens there are."""
    skip_reading_prefix_cache: bool | None = parameter(None, optional(truth))
    """Computes the whole prompt. None or False: as prompt_logprobs needs it."""
    cache_ttl: float | None = parameter(None, optional(_number(0.0, math.inf)))
    """Seconds for which prompt and text stay cached, at most the engine's max_cache_ttl. None or 0: none."""

    kv_cache_events: list[dict[str, Any]] | None = parameter(None, optional(check_events))
    """Events of an earlier answer to replay, with a kv_cache_floor: the same bits again. None: by pressure."""

    output_kind: Any = without_effect(0, check_output_kind, "LLM.generate returns finished texts", http=False)
    output_text_buffer_length: int = without_effect(0, _integer(0), "stop strings are held back as needed", http=False)
    skip_clone: bool = without_effect(False, truth, "parameters are always copied", http=False)
    spaces_between_special_tokens: bool = without_effect(True, truth, "tokenizers of `tokenizers` add no spaces")

    best_of: Any = unsupported(None, use="give n")
    use_beam_search: Any = unsupported(False, use="give n, temperature and seed for several texts")
    length_penalty: Any = unsupported(1.0, 1, use="it is for beam search: LLM.beam_search")
    guided_decoding: Any = unsupported(None, use="give structured_outputs")
    extra_args: Any = unsupported(None, {}, use="there are no extensions that read them")
    logits_processors: Any = unsupported(None, [], use="give logit_bias or structured_outputs")
    prompt_logprob_start: Any = unsupported(None, 0, use="prompt_logprobs are those of the whole prompt")
    prompt_logprob_token_ids: Any = unsupported(None, use="prompt_logprobs are those of the most likely tokens")
    routed_experts_prompt_start: Any = unsupported(0, use="answers do not have the experts")
    trace_decode_token_ids: Any = unsupported(None, use="tokens are sampled; prompt_logprobs scores given ones")
    watermarking: Any = unsupported(None, False, use="texts are not marked")

    def __post_init__(self) -> None:
        """Checks what excludes each other, too."""
        if type(self.best_of) is int and self.best_of == self.n:
            self.best_of = None
        super().__post_init__()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens must not exceed max_tokens, {self.max_tokens}, got {self.min_tokens}"
            raise InputError(message, "min_tokens")
        if not self.detokenize and (self.stop or self.stop_regex):
            field = "stop" if self.stop else "stop_regex"
            raise InputError(f"{field} needs detokenize=True, got False", field)
        if self.kv_cache_events is not None and self.n > 1:
            raise InputError(f"kv_cache_events are those of one text, but n is {self.n}", "kv_cache_events")
        scored = len(self.logprob_token_ids or ())
        if scored and self.logprobs not in (None, scored):
            message = f"logprobs must be None or the number of logprob_token_ids, {scored}, got {self.logprobs}"
            raise InputError(message, "logprobs")

    def with_all_logprobs(self, vocab: int) -> SamplingParams:
        """These parameters with the number of token ids in place of -1."""
        wanted: dict[str, Any] = {name: vocab for name in ("logprobs", "prompt_logprobs") if getattr(self, name) == -1}
        return dataclasses.replace(self, **wanted) if wanted else self

    def clone(self) -> SamplingParams:
        """A copy that shares nothing."""
        return copy.deepcopy(self)

    fewest_new_tokens: ClassVar[int] = 1

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the context that truncate_prompt_tokens=-1 leaves free."""
        return self.max_tokens or 1

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities of every new token in addition to its own; None: not even its own."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def flag_fields() -> list[dataclasses.Field[Any]]:
    """The fields that commands have as flags."""
    return [field for field in dataclasses.fields(SamplingParams) if field.metadata["help"]]
