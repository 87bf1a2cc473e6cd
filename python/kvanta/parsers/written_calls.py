"""Functions and calls as texts, for models whose chat templates do not show them: the parsers' syntaxes, written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvanta.parsers.section_calls import DeepSeekV3Calls, DeepSeekV31Calls, KimiK2Calls

Arguments = str | Mapping[str, Any]
"""A text is what a model wrote that is no JSON."""
_INTRODUCTION = """# Tools

You may call one or more of these functions, which are given as JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments like this:
{example}

The result of a call comes in a message of the user, like this:
{result}"""


@dataclass(frozen=True)
class WrittenCalls:
    """A syntax. `call`: of a name and arguments; `begin` and `end` stand around all calls of a message."""

    call: Callable[[str, Arguments], str]
    separator: str = "\n"
    begin: str = ""
    end: str = ""

    def instructions(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The functions, and how to call them."""
        return _INTRODUCTION.format(
            tools="\n".join(_json(tool.get("function", tool)) for tool in tools),
            example=self.calls([("NAME", {"ARGUMENT": "VALUE"})]),
            result=self.result("RESULT"),
        )

    def calls(self, calls: Sequence[tuple[str, Arguments]]) -> str:
        """Calls of one message: names and arguments."""
        return self.begin + self.separator.join(self.call(name, arguments) for name, arguments in calls) + self.end

    def result(self, text: str) -> str:
        """The result of a call."""
        return f"<tool_response>\n{text}\n</tool_response>"


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(name: str, field: str, arguments: Arguments) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{field}": {_json(arguments)}}}'


def _values(arguments: Arguments) -> list[tuple[str, str]]:
    pairs = arguments.items() if isinstance(arguments, Mapping) else [("", arguments)]
    return [(str(key), _json(value)) for key, value in pairs]


def _qwen3_coder(name: str, arguments: Arguments) -> str:
    values = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in _values(arguments)]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def _glm45(name: str, arguments: Arguments) -> str:
    values = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in _values(arguments)]
    return f"<tool_call>{name}\n{''.join(values)}</tool_call>"


def _section(syntax: type[DeepSeekV3Calls | KimiK2Calls], before: str, between: str, after: str = "") -> WrittenCalls:
    """`before` and `between` the name and the arguments."""

    def call(name: str, arguments: Arguments) -> str:
        return f"{syntax.call_begin}{before}{name}{between}{_json(arguments)}{after}{syntax.call_end}"

    return WrittenCalls(call, "", syntax.section_begin, syntax.section_end)


SYNTAXES: Mapping[str, WrittenCalls] = {
    "deepseek_v3": _section(DeepSeekV3Calls, f"function{DeepSeekV3Calls.separator}", "\n```json\n", "\n```"),
    "deepseek_v31": _section(DeepSeekV31Calls, "", DeepSeekV31Calls.separator),
    "gemma4": WrittenCalls(lambda name, given: f"<|tool_call>call:{name}{_json(given)}<tool_call|>", ""),
    "glm45": WrittenCalls(_glm45),
    "hermes": WrittenCalls(lambda name, given: f"<tool_call>\n{_object(name, 'arguments', given)}\n</tool_call>"),
    "kimi_k2": _section(KimiK2Calls, "functions.", f":0{KimiK2Calls.argument_begin}"),
    "llama3_json": WrittenCalls(lambda name, given: _object(name, "parameters", given), "; "),
    "mistral": WrittenCalls(lambda name, given: f"[TOOL_CALLS]{name}{_json(given)}", ""),
    "openai": WrittenCalls(
        lambda name, given: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        ),
        "<|start|>assistant",
    ),
    "qwen3_coder": WrittenCalls(_qwen3_coder),
}
"""Syntaxes by the names of tool_calls.PARSERS."""
DEFAULT = SYNTAXES["hermes"]
