"""Messages of a chat as templates expect them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.text.chat_template import check_messages

Messages = Sequence[Mapping[str, Any]]


class TextOfParts(str):
    """A content that came in several parts, as one text; `parts`: these texts, for chat templates that take them."""

    __slots__ = ("parts",)

    def __new__(cls, parts: Sequence[str]) -> Self:
        """Between the parts are line breaks."""
        text = super().__new__(cls, "\n".join(parts))
        text.parts = tuple(parts)
        return text

    parts: tuple[str, ...]


def text_of_parts(parts: Sequence[str]) -> str:
    """The parts' text."""
    return TextOfParts(parts) if len(parts) > 1 else "".join(parts)


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages whose contents are texts. Arguments of tool calls are objects, or texts that are not JSON.

    Raises InputError.
    """
    check_messages(messages)
    return [_plain(index, message) for index, message in enumerate(messages)]


def _plain(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: its content a text, the arguments of its tool calls objects."""
    plain = dict(message)
    plain["content"] = _content(index, message.get("content"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str) and message["role"] == "assistant":  # under the names that templates have for it
        plain["reasoning_content"] = plain["reasoning"] = reasoning
        if not plain["content"]:
            plain.setdefault("thinking", reasoning)
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = _tool_calls(index, calls)
    elif "tool_calls" in plain:
        del plain["tool_calls"]
    return plain


def _content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(
            f"the content of chat message {index} must be a text or a list of parts, got {one_line(content)}"
        )
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = kind or one_line(part)
            raise InputError(
                f"chat message {index} has a part {what!r}: only {{'type': 'text', 'text': ...}} is supported"
            )
        texts.append(part["text"])
    return text_of_parts(texts)


def _tool_calls(index: int, calls: Any) -> list[Any]:
    wrong = InputError(
        f"the tool_calls of chat message {index} must be a list of function calls, got {one_line(calls)}"
    )
    if not isinstance(calls, list):
        raise wrong
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise wrong
        plain.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return plain


def _arguments(given: Any) -> Mapping[str, Any] | str:
    """An object; anything else that a model wrote stays a text: it must not end the conversation."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, str):
        return json.dumps(given, ensure_ascii=False) if given else {}
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    if isinstance(arguments, dict):
        return arguments
    return given if arguments is not None else {}
