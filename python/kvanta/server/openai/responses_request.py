"""Bodies of POST /v1/responses, and the chats that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.server.requests.conversation import Conversation, field, kind_of, text_of
from kvanta.server.requests.protocol import Body, ChatRequest
from kvanta.server.requests.request_fields import RESPONSES_IGNORED, RESPONSES_REFUSED, Refused, check_refused
from kvanta.server.requests.translated import as_chat, further_fields

LOGPROBS = "message.output_text.logprobs"
# Others request outputs of tools that the server does not have, or reasoning, which the items have anyway.
_INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_SUMMARY = Refused("the reasoning itself is in the answer")
_REASONING: Mapping[str, Refused] = {
    "context": Refused("the chat template decides", ("auto",)),
    "generate_summary": _SUMMARY,
    "mode": Refused("there is one mode", ("standard",)),
    "summary": _SUMMARY,
}
_STREAM: Mapping[str, Refused] = {"include_obfuscation": Refused("events are sent without padding", (False,))}
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_OBJECT = {"type": "object"}

Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _OBJECT}]})]
Objects = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _OBJECT}, {"type": "null"}]})]
Names = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]})]

FIELD_NAMES: Mapping[str, str] = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""A chat's fields -> those of responses."""


class ResponsesRequest(Body):
    """POST /v1/responses. Further fields are those of chats."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Objects = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: Names = None
    top_logprobs: int | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @property
    def has_logprobs(self) -> bool:
        """Raises InputError for things that answers cannot include."""
        if not isinstance(self.include, list | None):
            raise InputError(f"include must be a list of texts, got {one_line(self.include)}", "include")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise InputError(f"include has {one_line(name)}; known: {', '.join(_INCLUDABLE)}", "include")
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """Raises InputError or ApiError."""
        fields = further_fields(self, RESPONSES_REFUSED, RESPONSES_IGNORED)
        check_refused(self.reasoning or {}, _REASONING, "reasoning.")
        check_refused(self.stream_options or {}, _STREAM, "stream_options.")
        if self.top_logprobs and not self.has_logprobs:
            raise InputError(f"top_logprobs needs include: ['{LOGPROBS}']", "top_logprobs")
        metadata = self.metadata or {}
        if len(metadata) > 16 or any(not isinstance(value, str) or len(value) > 512 for value in metadata.values()):
            message = f"metadata must be at most 16 texts of 512 characters, got {one_line(metadata)}"
            raise InputError(message, "metadata")
        text = self.text or {}
        with about("input"):
            messages = self._messages()
        with about("tools"):
            tools = _tools(self.tools)
        fields |= {
            "model": self.model,
            "messages": messages,
            "tools": tools,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
            "response_format": _format(text.get("format")),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
        }
        return as_chat(fields)

    def _messages(self) -> list[dict[str, Any]]:
        conversation = Conversation()
        if self.instructions:
            conversation.say("system", self.instructions)
        if isinstance(self.input, str):
            conversation.say("user", self.input)
        elif isinstance(self.input, list) and self.input:
            for index, item in enumerate(self.input):
                _add(conversation, f"input[{index}]", item)
        else:
            raise InputError(f"input must be a text or a list of items, got {one_line(self.input)}")
        return conversation.messages


def _add(conversation: Conversation, where: str, item: Any) -> None:
    kind = kind_of(item) or ("message" if isinstance(item, Mapping) and "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise InputError(f"{where}.role must be one of {', '.join(_ROLES)}, got {one_line(role)}")
        conversation.say(role, text_of(f"{where}.content", item.get("content"), _TEXTS))
    elif kind == "function_call":
        name, arguments = field(where, item, "name"), field(where, item, "arguments")
        conversation.call(field(where, item, "call_id"), name, arguments)
    elif kind == "function_call_output":
        output = text_of(f"{where}.output", item.get("output"), _TEXTS)
        conversation.result(where, field(where, item, "call_id"), output)
    elif kind == "reasoning":
        content = item.get("content") or []
        if not content and item.get("encrypted_content"):
            raise InputError(f"{where}.encrypted_content cannot be read; send the item's content, or leave it out")
        conversation.reason(text_of(f"{where}.content", content, ("reasoning_text",)))
    else:
        shown = one_line(item if kind is None else kind)
        raise InputError(f"{where} is {shown}, which is not supported; known types: {', '.join(_ITEMS)}")


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not isinstance(tools, list | None):
        raise InputError(f"tools must be a list of objects, got {one_line(tools)}")
    found = []
    for index, tool in enumerate(tools or []):
        if kind_of(tool) != "function" or not isinstance(tool.get("name"), str):
            shown = one_line(kind_of(tool) or tool)
            raise InputError(f"tools[{index}] is {shown}: only {{'type': 'function', 'name': ...}} is supported")
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        found.append({"type": "function", "function": function})
    return found or None


def _choice(choice: Any) -> Any:
    """The value as in chats."""
    if kind_of(choice) == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind_of(choice) == "allowed_tools":
        allowed = choice.get("tools")
        chosen = [_choice(each) for each in allowed] if isinstance(allowed, list) else allowed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": chosen}}
    return choice


def _format(given: Any) -> Any:
    """The value as in chats."""
    if kind_of(given) != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
