"""Bodies of POST /v1/responses, and the chats that they describe."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PrivateAttr, WithJsonSchema

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.server.http.hints import note, note_fields
from kvanta.server.requests.conversation import Conversation, field, kind_of, text_of
from kvanta.server.requests.custom_tools import INPUT, as_function, chat_choice, custom_tool
from kvanta.server.requests.protocol import Body, ChatRequest
from kvanta.server.requests.request_fields import (
    REASONING_IGNORED,
    RESPONSES_IGNORED,
    RESPONSES_REFUSED,
    STREAM_IGNORED,
)
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
_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("user", "assistant", "system", "developer")
_ITEMS = (
    *("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    "reasoning",
)
# Calls and results of tools of OpenAI's own service.
_VENDORS_ITEM = re.compile(
    r"\w+_call|\w+_output|mcp_\w+|compaction\w*|additional_tools|configuration_update|program|agent_message"
)
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
    store: bool | None = None
    previous_response_id: str | None = None
    _history: list[Any] = PrivateAttr(default_factory=list)

    def follow(self, items: list[Any]) -> None:
        """Sets the items of the conversation before the input."""
        self._history = items

    @property
    def has_logprobs(self) -> bool:
        """Anything else to be included is a hint: answers have no such parts, or have them always."""
        if not isinstance(self.include, list | None) or not all(isinstance(name, str) for name in self.include or ()):
            raise InputError(f"include must be a list of texts, got {one_line(self.include)}", "include")
        for name in self.include or ():
            if name != LOGPROBS:
                note(f"include[{name}]" if name in _INCLUDABLE else "include", "answers have no such parts")
        return LOGPROBS in (self.include or ())

    def chat(self, notes_unread: bool = False) -> ChatRequest:
        """Raises InputError or ApiError. `notes_unread`: see conversation.text_of."""
        fields = further_fields(self, RESPONSES_REFUSED, RESPONSES_IGNORED)
        note_fields(self.reasoning or {}, REASONING_IGNORED, "reasoning.")
        note_fields(self.stream_options or {}, STREAM_IGNORED, "stream_options.")
        if self.top_logprobs and not self.has_logprobs:
            raise InputError(f"top_logprobs needs include: ['{LOGPROBS}']", "top_logprobs")
        metadata = self.metadata or {}
        if len(metadata) > 16 or any(not isinstance(value, str) or len(value) > 512 for value in metadata.values()):
            message = f"metadata must be at most 16 texts of 512 characters, got {one_line(metadata)}"
            raise InputError(message, "metadata")
        text = self.text or {}
        if text.get("verbosity") is not None:
            note("text.verbosity", "write it into the instructions")
        with about("input"):
            messages = self._messages(notes_unread)
        with about("tools"):
            tools = [function for function, _ in _functions(self.tools)] or None
        fields |= {
            "model": self.model,
            "messages": messages,
            "tools": tools,
            "tool_choice": _choice(self.tool_choice) if tools or not self.tools else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
            "response_format": _format(text.get("format")),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
        }
        return as_chat(fields)

    @functools.cached_property
    def tool_kinds(self) -> dict[str, Mapping[str, Any]]:
        """The tools of the request that are no plain functions, by the names of the functions made of them."""
        return {function["function"]["name"]: tool for function, tool in _functions(self.tools) if tool is not None}

    def _messages(self, notes_unread: bool) -> list[dict[str, Any]]:
        conversation = Conversation(notes_unread)
        if self.instructions:
            conversation.say("system", self.instructions)
        for index, item in enumerate(self._history):
            _add(conversation, f"previous[{index}]", item)
        if isinstance(self.input, str):
            conversation.say("user", self.input)
        elif isinstance(self.input, list) and (self.input or self._history):
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
        conversation.say(role, conversation.text_of(f"{where}.content", item.get("content"), _TEXTS))
    elif kind == "function_call":
        arguments = item.get("arguments")  # a model may have written anything
        conversation.call(field(where, item, "call_id"), field(where, item, "name"), arguments)
    elif kind == "custom_tool_call":
        name, given = field(where, item, "name"), field(where, item, "input")
        conversation.call(field(where, item, "call_id"), name, {INPUT: given})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = conversation.text_of(f"{where}.output", item.get("output"), _TEXTS)
        conversation.result(where, field(where, item, "call_id"), output)
    elif kind == "reasoning":
        content = item.get("content") or []
        if not content and item.get("encrypted_content"):
            note("reasoning.encrypted_content", "only the server that made it can read it")
        conversation.reason(text_of(f"{where}.content", content, ("reasoning_text",)))
    elif isinstance(kind, str) and _VENDORS_ITEM.fullmatch(kind):
        note(f"input[{kind}]", f"known types: {', '.join(_ITEMS)}")
    else:
        shown = one_line(item if kind is None else kind)
        raise InputError(f"{where} is {shown}, which is not supported; known types: {', '.join(_ITEMS)}")


def _functions(tools: Any) -> list[tuple[dict[str, Any], Mapping[str, Any] | None]]:
    """Functions in the form of chats, each with the tool that it was made of unless it is a function itself.

    A custom tool is a function with one text; those of a namespace are functions. Tools of OpenAI's own service are
    hints.
    """
    if not isinstance(tools, list | None):
        raise InputError(f"tools must be a list of objects, got {one_line(tools)}")
    found: list[tuple[dict[str, Any], Mapping[str, Any] | None]] = []
    for index, tool in enumerate(tools or []):
        kind = kind_of(tool)
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            inner = _functions(tool["tools"])
            found += [(function, {**(made or {}), "namespace": tool.get("name")}) for function, made in inner]
        elif (custom := custom_tool(tool)) is not None:
            found.append((as_function(custom), {**custom, "type": "custom"}))
        elif kind == "function" and isinstance(tool.get("name"), str):
            function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
            found.append(({"type": "function", "function": function}, None))
        elif isinstance(kind, str) and kind not in ("function", "custom", "namespace"):
            note(f"tools[{kind}]", "the server has no such tool; functions and custom tools are called by the client")
        else:
            shown = one_line(tool)
            raise InputError(f"tools[{index}] is {shown}: only {{'type': 'function', 'name': ...}} is supported")
    return found


def _choice(choice: Any) -> Any:
    """The value as in chats."""
    kind = kind_of(choice)
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "custom":
        return chat_choice(choice)
    if isinstance(kind, str) and kind != "allowed_tools":
        note("tool_choice", f"the server has no tool {one_line(kind)}")
        return None
    if kind == "allowed_tools":
        allowed = choice.get("tools")
        chosen = [_choice(each) for each in allowed] if isinstance(allowed, list) else allowed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": chosen}}
    return choice


def _format(given: Any) -> Any:
    """The value as in chats."""
    if kind_of(given) != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
