"""Conversations in the form that a model's chat template takes, so that nothing in them is lost or refused.

* The role `developer` is `system` for templates that do not name it.
* System messages become one at the beginning for templates that take no others, and the beginning of the user's first
  message for those without a system role. Messages of the user in a row become one where roles must alternate.
* Functions, earlier calls and their results are written into the messages for templates that do not read them.
* Contents of several parts become one text for templates that do not take parts.
* Arguments of an earlier call that are no JSON stay a text where the template takes one; else they are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvanta.text.chat_messages import TextOfParts
from kvanta.text.template_traits import TemplateTraits

_SYSTEM = ("system", "developer")
_RESULT = ("tool", "function")


class ToolSyntax(Protocol):
    """Texts of functions and calls in the syntax that is searched for calls."""

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The functions, and how to call them."""

    def calls(self, calls: Sequence[tuple[str, str | Mapping[str, Any]]]) -> str:
        """Calls of one message: names and arguments."""

    def result(self, text: str) -> str:
        """The result of a call."""


def adapted(
    messages: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    tools: Sequence[Mapping[str, Any]] | None,
    syntax: ToolSyntax | None,
) -> list[dict[str, Any]]:
    """The messages for the template; those of the caller are not changed. `syntax`: None for no functions."""
    chat = [dict(message) for message in messages]
    if syntax is not None:
        _write_calls(chat, traits, syntax)
    _keep_texts(chat, traits)
    if any(message["role"] == "developer" for message in chat) and not traits.names_developer:
        for message in chat:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    if syntax is not None and tools and not traits.reads_tools:
        if chat[0]["role"] not in _SYSTEM:
            chat.insert(0, {"role": "system", "content": ""})
        chat[0]["content"] = _joined([syntax.instructions(tools), _text(chat[0])])
    chat = _alternating(_one_system(chat, traits), traits)
    for message in chat:
        content = message.get("content")
        if isinstance(content, TextOfParts):
            parts = [{"type": "text", "text": text} for text in content.parts]
            message["content"] = parts if traits.takes_parts(message["role"]) else str(content)
    return chat


def _write_calls(chat: list[dict[str, Any]], traits: TemplateTraits, syntax: ToolSyntax) -> None:
    for message in chat:
        calls = message.get("tool_calls")
        if calls and not traits.reads_calls:
            functions = [call["function"] for call in calls]
            written = syntax.calls([(str(each.get("name")), each.get("arguments") or {}) for each in functions])
            message["content"] = "\n".join(filter(None, [_text(message), written]))
            del message["tool_calls"]
        elif message["role"] in _RESULT and not traits.names_results:
            message["role"], message["content"] = "user", syntax.result(_text(message))


def _keep_texts(chat: list[dict[str, Any]], traits: TemplateTraits) -> None:
    for message in chat:
        calls = message.get("tool_calls") or ()
        if any(isinstance(call["function"].get("arguments"), str) for call in calls):
            if traits.takes_text_arguments:
                return
            message["tool_calls"] = [_without_text(call) for call in calls]


def _without_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    return {**call, "function": {**function, "arguments": {} if isinstance(arguments, str) else arguments}}


def _one_system(chat: list[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    systems = [message for message in chat if message["role"] in _SYSTEM]
    if not systems:
        return chat
    if (len(systems) > 1 or chat[0] is not systems[0]) and not traits.takes_several_systems:
        first = {**systems[0], "content": _joined([_text(message) for message in systems])}
        chat = [first, *(message for message in chat if message["role"] not in _SYSTEM)]
    if chat[0]["role"] not in _SYSTEM or traits.takes_system:
        return chat
    first, *others = chat
    user = next((message for message in others if message["role"] == "user"), None)
    if user is None:
        return [{**first, "role": "user"}, *others]
    user["content"] = _joined([_text(first), _text(user)])
    return others


def _alternating(chat: list[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    in_a_row = any(one["role"] == other["role"] == "user" for one, other in itertools.pairwise(chat))
    if not in_a_row or traits.takes_users_in_a_row:
        return chat
    texts: list[str] = []
    merged: list[dict[str, Any]] = []
    for message in [*chat, {"role": ""}]:
        if texts and message["role"] != "user":
            merged[-1]["content"] = _joined(texts)
            texts = []
        if message["role"] != "user" or not texts:
            merged.append(message)
        if message["role"] == "user":
            texts.append(_text(message))
    return merged[:-1]


def _joined(texts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _text(message: Mapping[str, Any]) -> str:
    """The content, which may be a list of parts with texts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
