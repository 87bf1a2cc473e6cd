"""Custom tools of OpenAI's APIs, whose input is any text. To the model each is a function of one text.

A tool is {"type": "custom", "custom": {"name", "description", "format"}} in chats; /v1/responses has the inner fields
at the top, and so may a chat.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvanta.server.requests.conversation import kind_of

INPUT = "input"
"""The argument of functions that custom tools become."""


def custom_tool(tool: Any) -> Mapping[str, Any] | None:
    """Name, description and format of a custom tool; None for other tools."""
    if kind_of(tool) != "custom":
        return None
    inner = tool.get("custom", tool)
    return inner if isinstance(inner, Mapping) and isinstance(inner.get("name"), str) else None


def as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function in the form of chats. `tool`: as custom_tool has it."""
    described = [tool.get("description")]
    given = tool.get("format")
    if isinstance(given, Mapping) and given.get("type") == "grammar":
        grammar = given.get("grammar")
        grammar = grammar if isinstance(grammar, Mapping) else given
        described.append(f"The input has the {grammar.get('syntax')} grammar:\n{grammar.get('definition')}")
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    text = "\n".join(part for part in described if isinstance(part, str))
    return {"type": "function", "function": {"name": tool["name"], "description": text, "parameters": parameters}}


def chat_choice(choice: Any) -> Any:
    """A `tool_choice` in which custom tools are functions; other values stay as they are."""
    kind = kind_of(choice)
    if kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), Mapping):
        allowed = choice["allowed_tools"]
        if isinstance(allowed.get("tools"), list):
            return {**choice, "allowed_tools": {**allowed, "tools": [*map(chat_choice, allowed["tools"])]}}
    tool = custom_tool(choice)
    return choice if tool is None else {"type": "function", "function": {"name": tool["name"]}}


def function_call(call: Any) -> Any:
    """An earlier call of a custom tool as a call of its function; other calls stay as they are."""
    tool = custom_tool(call)
    if tool is None:
        return call
    others = {name: value for name, value in call.items() if name not in ("custom", "name", "input")}
    return {**others, "type": "function", "function": {"name": tool["name"], "arguments": {INPUT: tool.get("input")}}}


def input_of(arguments: str) -> str:
    """The text of a call of a custom tool, from the arguments of its function."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):  # cut off by the limit of tokens
        return arguments
    value = given.get(INPUT) if isinstance(given, dict) else None
    return value if isinstance(value, str) else arguments


class CustomCalls:
    """Calls in one text of a chat: those of custom tools get their own form, when all of their JSON has come."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the custom tools."""
        self._names = names
        self._held: dict[str, Any] | None = None

    def take(self, calls: Sequence[dict[str, Any]], *, finished: bool) -> list[dict[str, Any]]:
        """New calls, and pieces of calls, as a chunk's `tool_calls` has them. `finished`: no more will come."""
        if not self._names:
            return list(calls)
        found: list[dict[str, Any]] = []
        for call in calls:
            function = call["function"]
            if "id" in call:
                found += self._release()
                if function["name"] in self._names:
                    self._held = {**call, "function": dict(function)}
                    continue
            if self._held is None:
                found.append(call)
            else:
                self._held["function"]["arguments"] += function["arguments"]
        return found + (self._release() if finished else [])

    def _release(self) -> list[dict[str, Any]]:
        held, self._held = self._held, None
        if held is None:
            return []
        function = held.pop("function")
        custom = {"name": function["name"], "input": input_of(function["arguments"])}
        return [{**held, "type": "custom", "custom": custom}]
