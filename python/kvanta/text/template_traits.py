"""The messages that a chat template shows: found by rendering short chats with it, once for a template.

A template may refuse a message, or leave it out without a word.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvanta.errors import InputError

Render = Callable[[Sequence[Mapping[str, Any]]], str]

_MARK = "Kvq{}zx"  # a word that no template has
_CALL_ID = "a1b2c3d4e"  # Mistral's templates take nine letters and digits only
_DEVELOPER = re.compile(r"['\"]developer['\"]")
_TOOL_ROLE = re.compile(r"['\"](?:tool|ipython|tool_results|observation)['\"]")


def _chat_with_call(arguments: Any, result: Any) -> list[dict[str, Any]]:
    calls = [{"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "f", "tool_call_id": _CALL_ID, "content": result},
    ]


def _chat_with(role: str, content: Any) -> list[dict[str, Any]]:
    """A short chat with a message of that role, at its usual place."""
    message, question = {"role": role, "content": content}, {"role": "user", "content": "a"}
    match role:
        case "system" | "developer":
            return [message, question]
        case "assistant":
            return [question, message, question]
        case "tool":
            return _chat_with_call({}, content)
    return [message]


class TemplateTraits:
    """Each is found when it is first needed."""

    def __init__(self, source: str, names: frozenset[str], render: Render) -> None:
        """`names`: variables that the template reads."""
        self._source = source
        self._render = render
        self._takes_parts: dict[str, bool] = {}
        self.reads_tools = "tools" in names
        self.reads_calls = "tool_calls" in source
        self.names_results = _TOOL_ROLE.search(source) is not None
        """It has a form for the results of calls."""

    @functools.cached_property
    def names_developer(self) -> bool:
        """The role `developer` is one of its own, and not just written as any role is."""
        return _DEVELOPER.search(self._source) is not None and self._shows("developer", "user")

    @functools.cached_property
    def takes_system(self) -> bool:
        """A system message at the beginning."""
        return self._shows("system", "user") or not self._shows("user")

    @functools.cached_property
    def takes_several_systems(self) -> bool:
        """System messages anywhere."""
        if self.names_developer and not self._shows("system", "developer", "user", "assistant", "developer", "user"):
            return False
        return self._shows("system", "system", "user", "assistant", "system", "user")

    @functools.cached_property
    def takes_users_in_a_row(self) -> bool:
        """Messages of the user that follow each other."""
        return self._shows("user", "user") or not self._shows("user")

    @functools.cached_property
    def takes_text_arguments(self) -> bool:
        """Arguments of an earlier call that are a text."""
        mark = _MARK.format(0)
        return mark in self._rendered(_chat_with_call(mark, "b"))

    def takes_parts(self, role: str) -> bool:
        """Contents of a role that are lists of parts of type `text`; the template does not write the list itself."""
        if role not in self._takes_parts:
            marks = [_MARK.format(0), _MARK.format(1)]
            rendered = self._rendered(_chat_with(role, [{"type": "text", "text": mark} for mark in marks]))
            _, first, rest = rendered.partition(marks[0])
            between, second, _ = rest.partition(marks[1])
            self._takes_parts[role] = bool(first and second) and "type" not in between
        return self._takes_parts[role]

    def _shows(self, *roles: str) -> bool:
        texts = [_MARK.format(index) for index in range(len(roles))]
        chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        rendered = self._rendered(chat)
        return all(text in rendered for text in texts)

    def _rendered(self, chat: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._render(chat)
        except InputError:
            return ""
