"""Chat templates: Jinja2 in a sandbox, with what templates of published models expect to find there.

Semantics follow transformers' apply_chat_template: whitespace control, loop controls, the functions raise_exception
and strftime_now, a tojson that keeps characters as they are, and {% generation %} blocks, which change nothing here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvanta.errors import InputError


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words for training; only its content matters."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as an instance attribute)

    def parse(self, parser: Parser) -> list[Node]:
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


class ChatTemplate:
    """A compiled template; `special` holds the texts of bos_token, eos_token and so on, if the model has them."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"the model's chat template cannot be read: {_one_line(error)}") from None
        self._special = dict(special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are further names that this model's template understands."""
        check_messages(messages)
        names: dict[str, Any] = {
            **self._special,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else [dict(tool) for tool in tools],
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        try:
            return self._template.render(names)
        except Exception as error:  # a template may raise anything that Python can
            raise InputError(f"the model's chat template refuses these messages: {_one_line(error)}") from None


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
            raise InputError(f"chat message {index} is {message!r:.60}, not a mapping with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise InputError(f"chat message {index} has no 'role'; usual roles: system, user, assistant, tool")
        if "content" not in message and "tool_calls" not in message:
            raise InputError(f"chat message {index} ({message['role']}) has no 'content'")
