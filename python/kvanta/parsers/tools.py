"""The functions that a chat may call: OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.

With `tool_choice` "required" or a named function the answer is held to JSON (structured output), whatever the model was
trained to write; with "auto" the model decides, and the server's --tool-call-parser finds its calls (tool_calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.constraints.json_schema import rebased
from kvanta.errors import InputError, about
from kvanta.params.checks import one_line, switch
from kvanta.params.structural_tag import MAX_CALLS
from kvanta.params.structured_outputs import StructuredOutputsParams

AUTO, NONE, REQUIRED = "auto", "none", "required"
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = (
    "'auto', 'none', 'required', {'type': 'function', 'function': {'name': ...}} or {'type': 'allowed_tools', ...}"
)
_ALLOWED = "{'mode': 'auto' or 'required', 'tools': [{'type': 'function', 'function': {'name': ...}}, ...]}"


@dataclass(frozen=True)
class Tools:
    """A request's tool fields. Raises InputError that names the field."""

    offered: Sequence[Mapping[str, Any]]
    """Tools in the chat template's form."""
    choice: str
    """AUTO, NONE, REQUIRED, or with `named` the function's name."""
    named: bool
    parallel: bool
    """More than one call in an answer."""

    @classmethod
    def read(cls, tools: Any, choice: Any, parallel: Any) -> Tools:
        """From a request's fields; None where it has none."""
        if not isinstance(tools, list | None) or not all(isinstance(tool, dict) for tool in tools or []):
            raise InputError(f"tools must be a list of objects, got {one_line(tools)}", "tools")
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            tools, choice = _allowed(tools or [], choice.get("allowed_tools"))
        function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        named = isinstance(name, str)
        if not named and choice not in (None, AUTO, NONE, REQUIRED):
            raise InputError(f"tool_choice must be {_CHOICES}, got {one_line(choice)}", "tool_choice")
        several = parallel is None or switch("parallel_tool_calls", parallel)
        read = cls(tools or [], name if isinstance(name, str) else choice or AUTO, named, several)
        if read.forced:
            read.structured_outputs()
        elif read.may_call:
            for tool in read.offered:
                _function(tool)
        with about("tools"):
            _ = read.strict
        return read

    @property
    def forced(self) -> bool:
        """The answer is a call, or several."""
        return self.named or self.choice == REQUIRED

    @property
    def may_call(self) -> bool:
        """The model decides."""
        return bool(self.offered) and not self.named and self.choice == AUTO

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of the arguments, where given, by the functions' names."""
        found = {}
        for tool in self.offered:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("parameters"), Mapping):
                found[str(function.get("name"))] = function["parameters"]
        return found

    @functools.cached_property
    def strict(self) -> frozenset[str]:
        """Names of the functions whose arguments must match their schemas."""
        functions = [tool.get("function") for tool in self.offered]
        return frozenset(
            str(each.get("name"))
            for each in functions
            if isinstance(each, Mapping) and switch("tools: strict of a function", each.get("strict") or False)
        )

    @functools.cached_property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """The schema of the arguments of every function. Raises InputError."""
        return dict(map(_function, self.offered))

    @property
    def for_template(self) -> list[Mapping[str, Any]] | None:
        """Tools for the template; None: a chat without functions."""
        silent = not self.named and self.choice == NONE
        return None if silent or not self.offered else list(self.offered)

    def structured_outputs(self) -> StructuredOutputsParams:
        """The constraint of a forced answer: a named function's arguments, or a list of {"name", "parameters"}."""
        schemas = self.functions
        if self.named:
            if self.choice not in schemas:
                known = ", ".join(schemas) or "none"
                message = f"tool_choice names the function {one_line(self.choice)}; tools has: {known}"
                raise InputError(message, "tool_choice")
            return StructuredOutputsParams(json=schemas[self.choice])
        if not schemas:
            raise InputError("tool_choice is 'required', and tools is empty", "tool_choice")
        schema = call_list_schema(schemas, ("name", "parameters"))
        return StructuredOutputsParams(json={**schema, "maxItems": MAX_CALLS if self.parallel else 1})


def _allowed(tools: Sequence[Mapping[str, Any]], allowed: Any) -> tuple[list[Mapping[str, Any]], str]:
    """The tools that `allowed_tools` leaves, and its mode. The model does not get the others."""
    mode, chosen = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in (AUTO, REQUIRED) or not isinstance(chosen, list) or not chosen:
        raise InputError(f"allowed_tools of tool_choice must be {_ALLOWED}, got {one_line(allowed)}", "tool_choice")
    offered = {_function(tool)[0]: tool for tool in tools}
    names = dict.fromkeys(_function(tool)[0] if isinstance(tool, Mapping) else one_line(tool) for tool in chosen)
    for name in names:
        if name not in offered:
            known = ", ".join(offered) or "none"
            message = f"tool_choice allows the function {one_line(name)}; tools has: {known}"
            raise InputError(message, "tool_choice")
    return [offered[name] for name in offered if name in names], mode


def _function(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name and the schema of the arguments."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(schema, Mapping | None):
        known = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        raise InputError(f"tools has {one_line(tool)}, not {known}", "tools")
    return name, schema or _NO_PARAMETERS


def call_schema(schemas: Mapping[str, Mapping[str, Any]], order: tuple[str, str], place: str) -> dict[str, Any]:
    """The schema of a call of any of these functions. `order`: the fields, "name" and that of the arguments.

    `place`: JSON pointer to where it will stand. References count from the root, so those of the functions' own
    schemas, which may have equal names for different definitions, are changed to what they mean there.
    """
    calls = [
        _call(name, schema, order, f"{place}/anyOf/{index}") for index, (name, schema) in enumerate(schemas.items())
    ]
    return {"anyOf": calls}


def call_list_schema(schemas: Mapping[str, Mapping[str, Any]], order: tuple[str, str]) -> dict[str, Any]:
    """The schema of a list of calls."""
    return {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": call_schema(schemas, order, "#/items")}


def _call(name: str, schema: Mapping[str, Any], order: tuple[str, str], place: str) -> dict[str, Any]:
    own = {field: rebased(schema, f"{place}/properties/{field}") for field in order if field != "name"}
    return {
        "type": "object",
        "properties": {field: own.get(field, {"const": name}) for field in order},
        "required": list(order),
        "additionalProperties": False,
    }
