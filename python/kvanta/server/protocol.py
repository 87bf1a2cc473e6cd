"""The bodies of requests. Types are checked here, ranges by SamplingParams; unknown fields are ignored, as OpenAI does.

Fields that may be long lists are Any with a schema of their own: pydantic would make an error for every element.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from kvanta.errors import InputError
from kvanta.sampling_params import SamplingParams
from kvanta.server.errors import ApiError
from kvanta.server.structured import read_form
from kvanta.server.tools import Tools
from kvanta.structured_output import StructuredOutputsParams
from kvanta.values import one_line, text, whole_number

_TOKENS = {"type": "array", "items": {"type": "integer"}}
_TEXT = {"type": "string"}

Prompts = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _TOKENS, {"type": "array", "items": _TOKENS}]}),
]
TokenIds = Annotated[Any, WithJsonSchema(_TOKENS)]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})]
Stops = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]})]
Biases = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]

# What would change the result and is not built: field -> values that ask for nothing.
_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "prompt_embeds": (None,),
    "audio": (None,),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "documents": (None, []),
    "chat_template": (None,),
    "lora_request": (None,),
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream tells beside the text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(_Body):
    """What both endpoints have in common. null means the default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: Stops = None
    stop_token_ids: Annotated[Any, WithJsonSchema({"anyOf": [_TOKENS, {"type": "null"}]})] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Biases = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    response_format: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})] = None
    user: Any = None

    def sampling_params(
        self, *, max_tokens: int | None, max_logprobs: int, logprobs: int | None, echo: bool = False
    ) -> SamplingParams:
        """Raises InputError or ApiError, naming the field.

        `max_tokens`: None for as many as the context holds. `logprobs`: of the new tokens, with `echo` of the prompt's.
        """
        self._refuse_what_is_not_built()
        given: dict[str, Any] = {"max_tokens": max_tokens}
        for name in _PASSED_ON:
            value = getattr(self, name)
            if value is not None:
                given[name] = value
        if self.seed is not None:
            given["seed"] = whole_number("seed", self.seed, -(2**63), 2**64 - 1) % 2**64
        if self.logit_bias is not None:
            given["logit_bias"] = _read_bias(self.logit_bias)
        given["structured_outputs"] = self._form()
        given["logprobs"] = logprobs
        given["prompt_logprobs"] = logprobs if echo and self.prompt_logprobs is None else self.prompt_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if given[name] is not None:
                whole_number(name, given[name], 0, max_logprobs, " (--max-logprobs) or null")
        return SamplingParams(**given)

    def _form(self) -> StructuredOutputsParams | None:
        """What every text must be."""
        return read_form(self.response_format, self.model_extra or {})

    def engine_fields(self) -> dict[str, Any]:
        """What the engine is told beside the sampling parameters."""
        return {
            "cache_salt": text("cache_salt", self.cache_salt or ""),
            "priority": whole_number("priority", self.priority or 0, -(2**31), 2**31 - 1),
        }

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Whether a stream ends with the usage, and whether every chunk has it."""
        options = self.stream_options
        if options is None:
            return False, False
        if not self.stream:
            raise InputError("stream_options is only allowed with stream: true")
        every = bool(options.continuous_usage_stats)
        return bool(options.include_usage), bool(options.include_usage) and every

    def _refuse_what_is_not_built(self) -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, f"best_of is {self.best_of}: not built, ask for n texts and choose", param="best_of")
        extra = self.model_extra or {}
        for name, nothing in _NOT_BUILT.items():
            if name in extra and extra[name] not in nothing:
                raise ApiError(400, f"{name} is {one_line(extra[name])}: not built", param=name)


_PASSED_ON = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)


def _read_bias(bias: Any) -> dict[int, Any]:
    """JSON has texts for keys."""
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias is {one_line(bias)}, not a mapping of token ids to numbers")
    if len(bias) > 1024:
        raise InputError(f"logit_bias has {len(bias)} entries, more than 1024")
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InputError(f"the keys of logit_bias are token ids, not {one_line(list(bias))}") from None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatFields(_Body):
    """How a conversation becomes a prompt."""

    messages: Messages
    tools: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})
    ] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @functools.cached_property
    def functions(self) -> Tools:
        """Raises InputError that names the field."""
        return Tools.read(self.tools, self.tool_choice, self.parallel_tool_calls)


class ChatRequest(ChatFields, SamplingFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None

    def _form(self) -> StructuredOutputsParams | None:
        form, functions = super()._form(), self.functions
        if not functions.forced:
            return form
        if form is not None:
            raise InputError(f"tool_choice {one_line(self.tool_choice)} and a form for the text exclude each other")
        return functions.form()

    @property
    def logprobs_wanted(self) -> int | None:
        """As SamplingParams has it."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InputError("top_logprobs needs logprobs: true")
            return None
        return self.top_logprobs or 0


class TokenizeRequest(ChatFields):
    """POST /tokenize: either a prompt or messages."""

    messages: Messages = None
    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """POST /detokenize."""

    tokens: TokenIds
