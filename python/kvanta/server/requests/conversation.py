"""The messages of a conversation, as chat templates read them, from the items of other APIs."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.server.http.hints import note
from kvanta.text.chat_messages import text_of_parts

# Words in the types of parts that models do not read -> their name in the text.
_UNREAD: Mapping[str, str] = {"image": "image", "audio": "audio", "video": "video", "file document": "file"}

_DOCUMENTS = ("document", "search_result", "compaction")
# Blocks of other vendors' own services, which nobody else can read, and what they tell these services.
_VENDORS = re.compile(
    r"server_tool_use|redacted_thinking|container_upload|compaction|fallback|tool_(?:addition|removal|reference)|"
    r"mcp_\w+|\w+_tool_result"
)


class Conversation:
    """Reasoning, text and calls of the assistant that follow each other become one message."""

    def __init__(self, notes_unread: bool = False) -> None:
        """`notes_unread`: parts that are not text become a note in the text; else they are refused."""
        self.notes_unread = notes_unread
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

    def text_of(self, where: str, content: Any, kinds: Sequence[str]) -> str:
        """See text_of."""
        return text_of(where, content, kinds, self.notes_unread)

    def reason(self, text: str) -> None:
        """Reasoning of the assistant."""
        message = self._assistant("content", "tool_calls")
        message["reasoning_content"] = message.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """A call by the assistant. `arguments`: an object, or what a model wrote instead."""
        self.calls[call_id] = name
        calls = self._assistant().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, where: str, call_id: str, text: str) -> None:
        """The result of a call. One of a call that a client has left out of a long history stays a result."""
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self.calls:
            message["name"] = self.calls[call_id]
        else:
            note(f"{where}.call_id", "no call before it has this id")
        self.messages.append(message)

    def _assistant(self, *absent: str) -> dict[str, Any]:
        """The last message if it is the assistant's and has none of `absent`, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(field) for field in absent):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def text_of(where: str, content: Any, kinds: Sequence[str], notes_unread: bool = False) -> str:
    """The text of a content, which is a text or a list of parts. Raises InputError for parts that are not text.

    `kinds`: the types of text parts. `notes_unread`: other parts become a note in the text instead.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{where} must be a text or a list of parts, got {one_line(content)}")
    texts = [_part_text(f"{where}[{index}]", part, kinds, notes_unread) for index, part in enumerate(content)]
    return text_of_parts([text for text in texts if text is not None])


def is_vendors(where: str, block: Any) -> bool:
    """True for a block of another vendor's service, which is a hint. `where`: begins with the request's field."""
    kind = kind_of(block)
    if not isinstance(kind, str) or not _VENDORS.fullmatch(kind) or _document_text(block) is not None:
        return False
    note(f"{where.partition('[')[0]}[{kind}]", "only the service that made it can read it")
    return True


def _part_text(where: str, part: Any, kinds: Sequence[str], notes_unread: bool) -> str | None:
    """None: a block without text for this model."""
    kind = kind_of(part)
    if kind in kinds and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if (text := _document_text(part)) is not None:
        return text
    if kind in ("file", "input_file") and (text := _file_text(part)) is not None:
        return text
    if is_vendors(where, part):
        return None
    if not notes_unread or not isinstance(kind, str):
        raise not_text(where, part, kinds)
    name = next((name for words, name in _UNREAD.items() if any(word in kind for word in words.split())), kind[:40])
    note(kind, "models read text alone (--unsupported-content note)")
    return f"[{name}: not read by this model]"


def _document_text(part: Any) -> str | None:
    """The title and text of a document, a search result or a summary (compaction); None if it is not text."""
    if kind_of(part) not in _DOCUMENTS:
        return None
    source = part.get("source")
    content = part.get("content")
    if isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        content = source.get("data" if source["type"] == "text" else "content")
    elif isinstance(source, Mapping) and source.get("type") == "base64":
        content = _decoded(source.get("data"))
    if isinstance(content, list):
        texts = [piece.get("text") for piece in content if kind_of(piece) == "text"]
        content = "\n".join(text for text in texts if isinstance(text, str)) if len(texts) == len(content) else None
    if not isinstance(content, str):
        return None
    title = part.get("title")
    return f"{title}\n{content}" if isinstance(title, str) and title else content


def _file_text(part: Mapping[str, Any]) -> str | None:
    """The name and text of a file; None if it is not text."""
    file = part.get("file", part)  # chats have the fields one level deeper than /v1/responses
    if not isinstance(file, Mapping):
        return None
    text, name = _decoded(file.get("file_data")), file.get("filename")
    return f"{name}\n{text}" if isinstance(name, str) and name and text is not None else text


def _decoded(data: Any) -> str | None:
    """The text of a file in base64, which may be a data URL; None if it is not text in UTF-8."""
    if not isinstance(data, str):
        return None
    if data.startswith("data:"):
        data = data.partition(";base64,")[2]
    try:
        text = base64.b64decode(data, validate=True).decode("utf-8-sig")
    except (ValueError, binascii.Error):
        return None
    return None if not text or "\0" in text or text.startswith("%PDF-") else text


def kind_of(item: Any) -> Any:
    """The `type` of an object."""
    return item.get("type") if isinstance(item, Mapping) else None


def not_text(where: str, part: Any, kinds: Sequence[str]) -> InputError:
    """The error for a part that models do not read."""
    kind = kind_of(part)
    shown = one_line(part) if kind is None or kind in kinds else one_line(kind)
    known = ", ".join(kinds)
    return InputError(
        f"{where} has the part {shown}: models read text alone; known types: {known}; a server with "
        "--unsupported-content note takes others as a note in the text"
    )


def field(where: str, item: Mapping[str, Any], name: str) -> str:
    """A text of an item. Raises InputError where it is missing or something else."""
    value = item.get(name)
    if not isinstance(value, str):
        raise InputError(f"{where}.{name} must be a text, got {one_line(value)}")
    return value
