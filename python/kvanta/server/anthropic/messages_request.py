"""Bodies of POST /v1/messages and /v1/messages/count_tokens, and the chats that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from kvanta.errors import InputError, about
from kvanta.params.checks import one_line, switch
from kvanta.parsers.answer import AnswerParsers
from kvanta.server.http.errors import THREAD_NOT_FOUND, ApiError
from kvanta.server.http.hints import note
from kvanta.server.openai.responses_request import Objects
from kvanta.server.requests.conversation import Conversation, field, is_vendors, kind_of
from kvanta.server.requests.protocol import Body, ChatRequest, Messages
from kvanta.server.requests.request_fields import MESSAGES_IGNORED, MESSAGES_REFUSED, UNKEPT
from kvanta.server.requests.translated import as_chat, further_fields
from kvanta.text.chat_messages import text_of_parts
from kvanta.text.tokenizer import Tokenizer

_TEXTS = ("text",)
_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "disabled")
_SWITCHES = ("enable_thinking", "thinking")
_TTLS: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}

FIELD_NAMES: Mapping[str, str] = {
    "parallel_tool_calls": "tool_choice",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""A chat's fields -> those of messages."""
System = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    messages: Messages
    system: System = None
    tools: Objects = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, parsers: AnswerParsers, notes_unread: bool = False) -> ChatRequest:
        """Raises InputError or ApiError. `notes_unread`: see conversation.text_of."""
        _check_thread((self.model_extra or {}).get("thread"))
        fields = further_fields(self, MESSAGES_REFUSED, MESSAGES_IGNORED)
        with about("tool_choice"):
            choice, parallel = _choice(self.tool_choice)
        with about("tools"):
            tools = _tools(self.tools)
        messages = self._messages(notes_unread)
        config = self.output_config or {}
        fields |= {
            "model": self.model,
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant",
            "tools": tools,
            "tool_choice": choice if tools or not self.tools else None,
            "parallel_tool_calls": parallel,
            "response_format": _format(config.get("format")),
            "reasoning_effort": config.get("effort"),
            "include_reasoning": (self.thinking or {}).get("display") != "omitted",
            "chat_template_kwargs": self._variables(parsers.tokenizer),
        }
        return as_chat(fields)

    def _messages(self, notes_unread: bool) -> list[dict[str, Any]]:
        conversation = Conversation(notes_unread)
        if self.system:
            with about("system"):
                conversation.say("system", conversation.text_of("system", self.system, _TEXTS))
        with about("messages"):
            self._read_messages(conversation)
        return conversation.messages

    def _read_messages(self, conversation: Conversation) -> None:
        if not isinstance(self.messages, list) or not self.messages:
            raise InputError(f"messages must be a list of messages, got {one_line(self.messages)}")
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            role = message.get("role") if isinstance(message, Mapping) else None
            if role == "user":
                _add_user(conversation, f"{where}.content", message.get("content"))
            elif role == "assistant":
                _add_assistant(conversation, f"{where}.content", message.get("content"))
            elif role == "system":
                conversation.say(role, conversation.text_of(f"{where}.content", message.get("content"), _TEXTS))
            else:
                raise InputError(f"{where}.role must be user, assistant or system, got {one_line(role)}")
        last = conversation.messages[-1] if conversation.messages else {}
        if not last or (last["role"] == "assistant" and (last.get("tool_calls") or not last.get("content"))):
            raise InputError("messages must end with a message of the user, or with a text of the assistant")

    def _variables(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Variables of the chat template, with the one that turns thinking on or off."""
        variables = dict(self.chat_template_kwargs or {})
        kind = (self.thinking or {}).get("type")
        if self.thinking is not None and kind not in _THINKING:
            raise InputError(f"thinking.type must be one of {', '.join(_THINKING)}, got {one_line(kind)}", "thinking")
        names = tokenizer.chat_template.names if tokenizer.chat_template is not None else frozenset()
        switch = next((name for name in _SWITCHES if name in names), None)
        if switch is not None and kind in ("enabled", "disabled"):
            variables.setdefault(switch, kind == "enabled")
        return variables


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages. Further fields are those of chats."""

    max_tokens: int
    stop_sequences: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
    ] = None
    stream: bool | None = None
    cache_control: Any = None

    def cache_ttl(self) -> float:
        """The longest time of any cache_control; 0 without one. Raises InputError."""
        contents = [message.get("content") for message in self.messages if isinstance(message, Mapping)]
        lists = [content for content in (*contents, self.system, self.tools) if isinstance(content, list)]
        blocks: list[tuple[str, Mapping[Any, Any]]] = [("", {"cache_control": self.cache_control})]
        blocks += [("a block's ", block) for each in lists for block in each if isinstance(block, Mapping)]
        return max(_seconds(where, block.get("cache_control")) for where, block in blocks)

    def chat(self, parsers: AnswerParsers, notes_unread: bool = False) -> ChatRequest:
        """Raises InputError or ApiError. `notes_unread`: see conversation.text_of."""
        chat = super().chat(parsers, notes_unread)
        chat.max_tokens, chat.stream = self.max_tokens, self.stream
        if self.stop_sequences is not None:
            if not isinstance(self.stop_sequences, list):
                message = f"stop_sequences must be a list of texts, got {one_line(self.stop_sequences)}"
                raise InputError(message, "stop_sequences")
            chat.stop = self.stop_sequences
        thinking = self.thinking or {}
        if thinking.get("type") == "enabled" and parsers.knows_thinking:
            chat.thinking_token_budget = thinking.get("budget_tokens")
        return chat


def _seconds(where: str, control: Any) -> float:
    if control is None:
        return 0.0
    if kind_of(control) != "ephemeral":
        message = f"cache_control: {where}type must be ephemeral, got {one_line(control)}"
        raise InputError(message, "cache_control")
    ttl = control.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in _TTLS:
        message = f"cache_control: {where}ttl must be one of {', '.join(_TTLS)}, got {one_line(ttl)}"
        raise InputError(message, "cache_control")
    return _TTLS[ttl]


def _blocks(where: str, content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InputError(f"{where} must be a text or a list of blocks, got {one_line(content)}")
    return content


def _add_user(conversation: Conversation, where: str, content: Any) -> None:
    """Results of calls become messages of their own; the texts between them stay together."""
    texts: list[str] = []

    def say() -> None:
        if texts:
            conversation.say("user", text_of_parts(texts))
            texts.clear()

    for index, block in enumerate(_blocks(where, content)):
        place = f"{where}[{index}]"
        if kind_of(block) == "tool_result":
            say()
            result = conversation.text_of(f"{place}.content", block.get("content") or "", _TEXTS)
            conversation.result(place, field(place, block, "tool_use_id"), result)
        elif not is_vendors(where, block):
            texts.append(conversation.text_of(where, [block], _TEXTS))
    say()


def _add_assistant(conversation: Conversation, where: str, content: Any) -> None:
    texts: list[str] = []
    calls = []
    for index, block in enumerate(_blocks(where, content)):
        place = f"{where}[{index}]"
        kind = kind_of(block)
        if kind == "text":
            texts.append(field(place, block, "text"))
        elif kind == "thinking":
            conversation.reason(field(place, block, "thinking"))
        elif kind == "tool_use":
            calls.append((field(place, block, "id"), field(place, block, "name"), block.get("input")))
        elif not is_vendors(where, block):
            texts.append(conversation.text_of(where, [block], _TEXTS))
    if texts:
        conversation.say("assistant", text_of_parts(texts))
    for call_id, name, arguments in calls:
        conversation.call(call_id, name, arguments)


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if not isinstance(tools, list | None):
        raise InputError(f"tools must be a list of objects, got {one_line(tools)}")
    found = []
    for index, tool in enumerate(tools or []):
        schema = tool.get("input_schema") if isinstance(tool, Mapping) else None
        kind = kind_of(tool)
        if isinstance(kind, str) and kind != "custom" and schema is None:
            note(f"tools[{kind}]", "the server has no such tool; those with an input_schema are called by the client")
            continue
        if kind not in (None, "custom") or not isinstance(schema, Mapping):
            shown = one_line(kind_of(tool) or tool)
            raise InputError(f"tools[{index}] is {shown}: only {{'name': ..., 'input_schema': {{...}}}} is supported")
        function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
        found.append({"type": "function", "function": {**function, "parameters": schema}})
    return found or None


def _check_thread(thread: Any) -> None:
    """Raises ApiError for a message that continues another: a client that knows threads then sends all messages."""
    if kind_of(thread) == "continue":
        message = f"thread.previous_message_id: there is no message {one_line(thread.get('previous_message_id'))}"
        raise ApiError(404, f"{message}: {UNKEPT}", code=THREAD_NOT_FOUND, param="thread")


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool]:
    """`tool_choice` and `parallel_tool_calls` of a chat."""
    if choice is None:
        return None, True
    disabled = choice.get("disable_parallel_tool_use") or False
    parallel = not switch("tool_choice.disable_parallel_tool_use", disabled)
    kind = str(choice.get("type"))
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind not in _CHOICES:
        raise InputError(f"tool_choice.type must be one of {', '.join(_CHOICES)}, tool, got {one_line(kind)}")
    return _CHOICES[kind], parallel


def _format(given: Any) -> Any:
    """The format as in chats."""
    if given is None:
        return None
    if kind_of(given) != "json_schema":
        known = "{'type': 'json_schema', 'schema': {...}}"
        raise ApiError(400, f"output_config.format must be {known}, got {one_line(given)}", param="output_config")
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}
