"""Bodies of HTTP requests. Types are checked here, ranges by SamplingParams; unknown fields are ignored, as by OpenAI.

The sampling fields are those of SamplingParams. Fields that may be long lists are Any with a separate schema:
pydantic would make an error for every element.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, WithJsonSchema, create_model

from kvanta.errors import InputError
from kvanta.params.checks import one_line, switch, text, whole_number
from kvanta.params.fields import Parameters
from kvanta.params.sampling_params import SamplingParams
from kvanta.params.structured_outputs import StructuredOutputsParams
from kvanta.parsers.tools import Tools
from kvanta.server.http.errors import ApiError, api_error
from kvanta.server.http.hints import note
from kvanta.server.requests.custom_tools import as_function, chat_choice, custom_tool
from kvanta.server.requests.fill_in import fill_prompt, fill_tokens
from kvanta.server.requests.request_fields import check_fields
from kvanta.server.requests.structured import FIELDS as CONSTRAINT_FIELDS
from kvanta.server.requests.structured import note_loosened, read_structured_outputs
from kvanta.text.tokenizer import Tokenizer

_TOKENS = {"type": "array", "items": {"type": "integer"}}
_TEXT = {"type": "string"}
_MAX_USER = 256
"""Characters of a user's name that count."""

Prompts = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _TOKENS, {"type": "array", "items": _TOKENS}]}),
]
TokenIdLists = Annotated[Any, WithJsonSchema({"anyOf": [_TOKENS, {"type": "array", "items": _TOKENS}]})]
TokenIds = Annotated[Any, WithJsonSchema(_TOKENS)]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1})]


class Body(BaseModel):
    """A body of any endpoint. Numbers may be written as 16.0 or "16", as vLLM takes them."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None


class StreamOptions(BaseModel):
    """Usage figures in a stream."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class QueueFields(Body):
    """Fields of requests that the engine queues."""

    cache_salt: str | None = None
    priority: int | None = None

    @property
    def end_user(self) -> str:
        """The client's name of the end user; empty: none given."""
        extra = self.model_extra or {}
        metadata = extra.get("metadata")
        names = (
            extra.get("safety_identifier"),
            extra.get("user"),
            metadata.get("user_id") if isinstance(metadata, dict) else None,  # Anthropic's name
        )
        return text("user", next((name for name in names if isinstance(name, str) and name), "")[:_MAX_USER])

    def engine_fields(self) -> dict[str, Any]:
        """Arguments of the engine in addition to the parameters."""
        salt = text("cache_salt", self.cache_salt or "")
        extra_key = text("extra_key", (self.model_extra or {}).get("extra_key") or "")  # SGLang's name
        return {
            "cache_salt": f"{salt}\0{extra_key}" if salt and extra_key else salt or extra_key,
            "priority": whole_number("priority", self.priority or 0, -(2**31), 2**31 - 1),
        }


def parameter_fields(parameters: type[Parameters]) -> dict[str, Any]:
    """HTTP fields from a class of parameters: name -> (type, None). Numbers and switches have their own types."""
    hints = get_type_hints(parameters)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(parameters):  # type: ignore[arg-type]
        hint = hints[field.name] | None
        if hint not in (int | None, float | None, bool | None):
            schema = TypeAdapter(hint).json_schema()
            hint = Annotated[Any, WithJsonSchema(_inlined(schema, schema.pop("$defs", {})))]
        if field.metadata["http"]:
            fields[field.name] = (hint, None)
    return fields


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema without references: it becomes a part of another document."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    if name:
        return _inlined(definitions[name], definitions)
    return {key: _inlined(each, definitions) for key, each in schema.items()}


SAMPLING_FIELDS = parameter_fields(SamplingParams)
_SamplingBody = create_model("_SamplingBody", __base__=QueueFields, **SAMPLING_FIELDS)


class SamplingFields(_SamplingBody):  # type: ignore[misc, valid-type]
    """Fields of both endpoints. null means the default."""

    template_fields: ClassVar[Collection[str]] = ()
    """Undeclared fields that the chat template may read."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})] = None

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        max_logprobs: int,
        logprobs: int | None,
        echo: bool = False,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> SamplingParams:
        """Raises InputError or ApiError, naming the field.

        `max_tokens`: None for as many as the context holds. `logprobs`: of the new tokens, with `echo` of the prompt's.
        `defaults`: for fields that the request does not give.
        """
        check_fields(self.model_extra or {}, self.template_fields)
        given = {name: getattr(self, name) for name in self.model_fields_set & SAMPLING_FIELDS.keys()}
        given = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        given["max_tokens"] = max_tokens
        if self.seed not in (None, -1):  # -1: a random one
            given["seed"] = whole_number("seed", self.seed, -(2**63), 2**64 - 1) % 2**64
        if self.logit_bias is not None:
            given["logit_bias"] = _read_bias(self.logit_bias)
        given["structured_outputs"] = constraint = self._structured_outputs()
        if constraint is not None:
            field = self.constraint_field
            note_loosened(constraint, "tools" if field == "tool_choice" else field)
        if self._extra_switch("no_stop_trim"):  # SGLang's name
            given["include_stop_str_in_output"] = True
        given["logprobs"] = logprobs
        given["prompt_logprobs"] = logprobs if echo and self.prompt_logprobs is None else self.prompt_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if given[name] is not None:
                whole_number(name, given[name], 0, max_logprobs, " (--max-logprobs) or null")
        if self.logprob_token_ids:
            if logprobs is None:
                raise ApiError(400, "logprob_token_ids needs logprobs, got none", param="logprob_token_ids")
            given["logprobs"] = None
        try:
            return SamplingParams(**given)
        except InputError as error:
            raise api_error(error) from None

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """The constraint of every text; None: none."""
        return read_structured_outputs(self.response_format, self.model_extra or {})

    @property
    def constraint_field(self) -> str:
        """The field that constrains the text."""
        extra = self.model_extra or {}
        return next((name for name in ("structured_outputs", *CONSTRAINT_FIELDS) if extra.get(name)), "response_format")

    def _extra_switch(self, name: str) -> bool:
        """A switch of SGLang, which is not among the declared fields."""
        value = (self.model_extra or {}).get(name)
        return value is not None and switch(name, value)

    @property
    def usage_in_stream(self) -> tuple[bool, bool]:
        """Two flags: a stream ends with the usage; every chunk has it."""
        options = self.stream_options
        if options is None:
            return False, False
        if not self.stream:
            raise InputError("stream_options is only allowed with stream: true", "stream_options")
        every = bool(options.continuous_usage_stats)
        return bool(options.include_usage), bool(options.include_usage) and every


def _read_bias(bias: Any) -> dict[int, Any]:
    """Token ids from the keys, which are texts in JSON."""
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, got {one_line(bias)}", "logit_bias")
    if len(bias) > 1024:
        raise InputError(f"logit_bias must have at most 1024 entries, got {len(bias)}", "logit_bias")
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        message = f"the keys of logit_bias must be token ids, got {one_line(list(bias))}"
        raise InputError(message, "logit_bias") from None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts = None
    input_ids: TokenIdLists = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: str | None = None

    def filled(self, tokenizer: Tokenizer) -> Any:
        """The prompts; with `suffix`, token ids that ask for what stands before it. Raises InputError or ApiError."""
        if not self.suffix:
            return self.prompts
        tokens = fill_tokens(tokenizer)
        if tokens is None:
            message = "suffix is not supported: this model has no tokens for filling in the middle"
            raise ApiError(400, message, param="suffix")
        texts = [self.prompts] if isinstance(self.prompts, str) else self.prompts
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise InputError(f"suffix needs prompts that are texts, got {one_line(texts)}", "prompt")
        return [fill_prompt(tokenizer, tokens, (each,), self.suffix) for each in texts]

    @property
    def prompts(self) -> Any:
        """`prompt`, or token ids under SGLang's name."""
        if (self.prompt is None) == (self.input_ids is None):
            given = "nothing" if self.prompt is None else "both"
            raise ApiError(400, f"give either prompt or input_ids, got {given}", param="prompt")
        return self.input_ids if self.prompt is None else self.prompt

    @property
    def given_names(self) -> Mapping[str, str]:
        """Names in messages -> the request's, where these differ."""
        return {} if self.input_ids is None else {"prompt": "input_ids"}


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off, and fields by which clients do."""


class ChatFields(Body):
    """Fields that make a prompt of a conversation."""

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
    reasoning_effort: str | None = None

    @functools.cached_property
    def functions(self) -> Tools:
        """Custom tools among them. Raises InputError that names the field."""
        tools = self.tools
        if isinstance(tools, list):
            found = ((tool, custom_tool(tool)) for tool in tools)
            functions = [tool if custom is None else as_function(custom) for tool, custom in found]
            tools = [tool for tool in functions if not _is_vendors(tool)]
        choice = chat_choice(self.tool_choice) if tools or not self.tools else None  # none of the tools is left
        return Tools.read(tools, choice, self.parallel_tool_calls)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose input is any text."""
        return frozenset(tool["name"] for tool in map(custom_tool, self.tools or ()) if tool is not None)


def _is_vendors(tool: Any) -> bool:
    """True for a tool of a vendor's own service, which is a hint here."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str) or kind == "function" or "function" in tool:
        return False
    note(f"tools[{kind}]", "the server has no such tool; functions and custom tools are called by the client")
    return True


class ChatRequest(ChatFields, SamplingFields):
    """POST /v1/chat/completions."""

    template_fields: ClassVar[Collection[str]] = (*THINKING_SWITCHES, "reasoning")
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None

    @property
    def constraint_field(self) -> str:
        """The field that constrains the text."""
        if self.functions.forced:
            return "tool_choice"
        by_tools = self.functions.strict and super()._structured_outputs() is None
        return "tools" if by_tools else super().constraint_field

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        given, functions = super()._structured_outputs(), self.functions
        if not functions.forced:
            return given
        # OpenAI's and Anthropic's own field constrains answers that are texts, and a call is not.
        if given is not None and super().constraint_field != "response_format":
            message = f"tool_choice {one_line(self.tool_choice)} and a constraint of the text exclude each other"
            raise InputError(message, "tool_choice")
        return functions.structured_outputs()

    @property
    def given_names(self) -> Mapping[str, str]:
        """Names of SamplingParams -> the request's, where these differ."""
        names = {"prompt": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.top_logprobs is not None:
            names["logprobs"] = "top_logprobs"
        return names

    @property
    def requested_logprobs(self) -> int | None:
        """`logprobs` of SamplingParams."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InputError("top_logprobs needs logprobs: true", "top_logprobs")
            return None
        return self.top_logprobs or 0


class TokenizeRequest(ChatFields):
    """POST /tokenize: either a prompt or messages; or `content`, llama.cpp's name, with its further fields."""

    messages: Messages = None
    prompt: str | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: TokenIds
