"""Messages of chats whose contents clients of other APIs have written: their blocks become what chats have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvanta.server.http.hints import note
from kvanta.server.requests.conversation import is_vendors, kind_of, text_of
from kvanta.server.requests.custom_tools import function_call

_TEXTS = ("text", "input_text", "output_text")
_REASONING = ("thinking", "reasoning", "reasoning_text")


def readable(messages: Any, notes_unread: bool) -> Any:
    """Messages whose contents are texts. Reasoning, calls and results within contents go where chats have them.

    `notes_unread`: see conversation.text_of. Raises InputError for parts that models do not read.
    """
    if not isinstance(messages, list):
        return messages
    return [each for at, message in enumerate(messages) for each in _readable(f"messages[{at}]", message, notes_unread)]


def _readable(where: str, message: Any, notes_unread: bool) -> list[Any]:
    if not isinstance(message, Mapping):
        return [message]
    plain = dict(message)
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = calls = [function_call(call) for call in calls]
    content = plain.get("content")
    if not isinstance(content, list) or all(kind_of(part) in (None, "text") for part in content):
        return [plain]
    where += ".content"
    results: list[Any] = []
    parts = []
    for part in content:
        kind = kind_of(part)
        if kind in _REASONING and plain.get("role") == "assistant":
            _reason(plain, part)
        elif kind == "tool_use" and plain.get("role") == "assistant" and isinstance(part.get("name"), str):
            _call(plain, part)
        elif kind == "tool_result" and isinstance(part.get("tool_use_id"), str):
            text = text_of(f"{where}[tool_result].content", part.get("content") or "", _TEXTS, notes_unread)
            results.append({"role": "tool", "tool_call_id": part["tool_use_id"], "content": text})
        elif not is_vendors(where, part):
            parts.append(part)
    if results and not parts:
        return results
    plain["content"] = text_of(where, parts, _TEXTS, notes_unread)
    return [*results, plain]


def _reason(message: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds the reasoning of a part, unless the message has it under its own field."""
    given = next((part[name] for name in ("thinking", "reasoning", "text") if part.get(name)), "")
    if isinstance(given, list):  # Mistral's
        given = "\n".join(str(each.get("text", "")) for each in given if isinstance(each, Mapping))
    if not message.get("reasoning_content") and not message.get("reasoning") and isinstance(given, str):
        message["reasoning_content"] = given


def _call(message: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Adds a call, unless the message has it among its own."""
    calls = [*(message.get("tool_calls") or ())]
    if any(isinstance(call, Mapping) and call.get("id") == part.get("id") for call in calls):
        note("messages[tool_use]", "the message has the call in tool_calls")
        return
    function = {"name": part["name"], "arguments": part.get("input") or {}}
    message["tool_calls"] = [*calls, {"id": part.get("id"), "type": "function", "function": function}]
