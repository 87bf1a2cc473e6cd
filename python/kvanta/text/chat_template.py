"""Chat templates: Jinja2 in a sandbox, with what templates of published models expect to find there.

Semantics follow transformers' apply_chat_template: whitespace control, loop controls, the functions raise_exception
and strftime_now, a tojson that does not escape characters, and {% generation %} blocks, which change nothing here.
The sandbox limits its time and its memory (template_sandbox.py, template_budget.py).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from kvanta.errors import InputError
from kvanta.text.template_budget import begin_budget, chat_size
from kvanta.text.template_sandbox import Sandbox
from kvanta.text.template_traits import TemplateTraits


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words for training; only its content matters."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


MAX_TEMPLATE_BYTES = 1 << 20
"""Published ones have at most 40 kB."""


class ChatTemplate:
    """A compiled template; `special` holds the texts of the model's bos_token, eos_token and other special tokens."""

    def __init__(self, source: str, special: Mapping[str, str], place: str = "") -> None:
        """`place`: the model's file that has it, whose errors wait for the first chat, in `error`; "": none, and errors
        are raised at once.
        """
        self.source = source
        self.place = place
        self.names: frozenset[str] = frozenset()
        """Variables that it reads."""
        self.error: InputError | None = None
        self._special = dict(special)
        if len(source) > MAX_TEMPLATE_BYTES:
            raise InputError(
                f"the model's chat template has {len(source):,} characters, and at most {MAX_TEMPLATE_BYTES:,} are read"
            )
        try:
            self._compile()
        except InputError as error:
            if not place:
                raise
            self.error = error
        self.traits = TemplateTraits(source, self.names, self.render)

    def _compile(self) -> None:
        source = self.source
        environment = Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            names = environment.parse(source).find_all(nodes.Name)
            self.names = frozenset(name.name for name in names if name.ctx == "load")
        except Exception as error:  # Jinja2 makes Python of it, so that anything can come of it: SyntaxError, ...
            of, remedy = (f" ({self.place})", "; --chat-template FILE takes another") if self.place else ("", "")
            message = f"the model's chat template{of} cannot be read: {_one_line(error)}{remedy}"
            raise InputError(message, "messages" if self.place else None) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are further names that this model's template understands.

        `continue_final_message`: the prompt ends within the last message, so that the model goes on with it; then
        `add_generation_prompt` must be off.
        """
        if self.error is not None:
            raise InputError(str(self.error), self.error.field)
        check_messages(messages)
        chat = [dict(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                message = "continue_final_message and add_generation_prompt exclude each other"
                raise InputError(message, "continue_final_message")
            _mark_end(chat[-1])
        names: dict[str, Any] = {
            **self._special,
            "messages": chat,
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        begin_budget(*chat_size(chat))
        try:
            text = self._template.render(names)
        except Exception as error:  # a template may raise anything that Python can
            message = f"the model's chat template refuses these messages: {_one_line(error)}"
            raise InputError(message, "messages") from None
        return _up_to_mark(text) if continue_final_message else text


_END_MARK = "END_OF_THE_MESSAGE_TO_CONTINUE "


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _END_MARK}]
        return
    if not isinstance(content, str):
        message_needed = "continue_final_message needs a last message whose content is a text"
        raise InputError(message_needed, "continue_final_message")
    message["content"] = content + _END_MARK


def _up_to_mark(text: str) -> str:
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        message = "continue_final_message: the model's chat template does not show the last message"
        raise InputError(message, "continue_final_message")
    if text.startswith(_END_MARK, end):
        return text[:end]
    return text[:end].rstrip()  # the template takes spaces away from the end of messages


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError unless `messages` is a list of {"role": ..., "content": ...}."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InputError(f"chat messages must be a list of {{'role', 'content'}}, not {type(messages).__name__}")
    if not messages:
        raise InputError("a chat needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"chat message {index} must be a mapping with 'role' and 'content', got {message!r:.60}")
        if not isinstance(message.get("role"), str):
            raise InputError(f"chat message {index} has no 'role'; usual roles: system, user, assistant, tool")
        if "content" not in message and "tool_calls" not in message:
            raise InputError(f"chat message {index} ({message['role']}) has no 'content'")
