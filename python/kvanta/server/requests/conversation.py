"""The messages of a conversation, as chat templates read them, from the items of other APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line


class Conversation:
    """Reasoning, text and calls of the assistant that follow each other become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.calls: dict[str, str] = {}
        """Names of the functions that were called, by the calls' ids."""

    def say(self, role: str, text: str) -> None:
        """A text of any role."""
        if role != "assistant":
            self.messages.append({"role": role, "content": text})
            return
        message = self._assistant("content", "tool_calls")
        message["content"] = text

    def reason(self, text: str) -> None:
        """Reasoning of the assistant."""
        message = self._assistant("content", "tool_calls")
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """A call by the assistant."""
        self.calls[call_id] = name
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, where: str, call_id: str, text: str) -> None:
        """The result of a call. Raises InputError for an id that no call has."""
        if call_id not in self.calls:
            raise InputError(f"{where}: no call before it has the id {one_line(call_id)}")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "name": self.calls[call_id], "content": text})

    def _assistant(self, *absent: str) -> dict[str, Any]:
        """The last message if it is the assistant's and has none of `absent`, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(field) for field in absent):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def text_of(where: str, content: Any, kinds: Sequence[str]) -> str:
    """The text of a content, which is a text or a list of parts. Raises InputError for parts that are not text.

    `kinds`: the types of text parts.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where} must be a text or a list of parts, got {one_line(content)}")
    texts = []
    for index, part in enumerate(content):
        kind = kind_of(part)
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise not_text(f"{where}[{index}]", part, kinds)
        texts.append(part["text"])
    return "\n".join(texts)


def kind_of(item: Any) -> Any:
    """The `type` of an object."""
    return item.get("type") if isinstance(item, Mapping) else None


def not_text(where: str, part: Any, kinds: Sequence[str]) -> InputError:
    """The error for a part that models do not read."""
    kind = kind_of(part)
    shown = one_line(part) if kind is None or kind in kinds else one_line(kind)
    return InputError(f"{where} has the part {shown}: models read text alone; known types: {', '.join(kinds)}")


def field(where: str, item: Mapping[str, Any], name: str) -> str:
    """A text of an item. Raises InputError where it is missing or something else."""
    value = item.get(name)
    if not isinstance(value, str):
        raise InputError(f"{where}.{name} must be a text, got {one_line(value)}")
    return value
