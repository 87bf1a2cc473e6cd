"""Constraints for calls that a model writes without being forced to, in the syntax that `--tool-call-parser` names.

With `strict` functions, a call is one of the given functions once it has begun, and the arguments of strict ones match
their schemas, as in OpenAI's API, vLLM and SGLang. Arguments of other functions are any object.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvanta.params.structural_tag import Json, OneOf, Part, StructuralTag, Tag, TextUntil
from kvanta.params.structured_outputs import StructuredOutputsParams
from kvanta.parsers.gemma_schemas import gemma_arguments
from kvanta.parsers.tools import Tools, call_list_schema, call_schema
from kvanta.parsers.xml_calls import argument_schemas, types_of

_OBJECT: Mapping[str, Any] = {"type": "object"}
_LINE = OneOf(("\n", ""))
_SPACE = OneOf((" ", ""))
_ONE_MARK = ("gemma4", "glm45", "hermes", "mistral", "qwen3_coder")
"""Syntaxes whose calls begin with one mark, and not with what begins any JSON."""
Schemas = Mapping[str, Mapping[str, Any]]


def constrain_calls(tools: Tools, parser: str, given: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """The constraint of an answer that may be, or have, calls.

    `parser`: a name of PARSERS, or empty. `given`: the request's for the text: JSON, or a call instead of it.
    """
    syntax = SYNTAXES.get(parser)
    combined = given is not None and given.kind in ("json", "json_object") and parser in _ONE_MARK
    if syntax is None or not tools.may_call or not (combined if given else tools.strict):
        return given
    schemas = {name: schema if name in tools.strict else _OBJECT for name, schema in tools.functions.items()}
    tags = list(syntax(schemas))
    if given is None:
        return StructuredOutputsParams(structural_tag=StructuralTag(tags))
    schema = _OBJECT if given.json is None else given.json
    alone = [dataclasses.replace(tag, alone=True) for tag in tags]
    tag = StructuralTag(alone, instead=Json(schema))
    return dataclasses.replace(given, json=None, json_object=False, structural_tag=tag)


def _hermes(schemas: Schemas) -> Iterator[Tag]:
    """Some models write the arguments first."""
    for name, schema in schemas.items():
        for order in (("name", "arguments"), ("arguments", "name")):
            yield Tag("<tool_call>", (_LINE, Json(call_schema({name: schema}, order)), _LINE, "</tool_call>"))


def _llama3_json(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        quoted = json.dumps(name, ensure_ascii=False)
        parts = (_SPACE, quoted, ",", _SPACE, '"parameters":', _SPACE, Json(schema), "}")
        yield Tag('{"name":', parts, alone=True)


def _mistral(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        yield Tag("[TOOL_CALLS]", (_SPACE, name, OneOf(("[ARGS]", "")), Json(schema)))
    yield Tag("[TOOL_CALLS]", (_SPACE, Json(call_list_schema(schemas, ("name", "arguments")))))


def _deepseek_v3(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        begin = f"function<｜tool▁sep｜>{name}\n```json\n"  # noqa: RUF001
        yield Tag("<｜tool▁call▁begin｜>", (begin, Json(schema), "\n```<｜tool▁call▁end｜>"))  # noqa: RUF001


def _deepseek_v31(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        parts = (f"{name}<｜tool▁sep｜>", Json(schema), "<｜tool▁call▁end｜>")  # noqa: RUF001
        yield Tag("<｜tool▁call▁begin｜>", parts)  # noqa: RUF001


def _kimi_k2(schemas: Schemas) -> Iterator[Tag]:
    numbers = OneOf([str(index) for index in range(100)])
    for name, schema in schemas.items():
        end = "<|tool_call_end|>"
        parts = (f"functions.{name}:", numbers, "<|tool_call_argument_begin|>", Json(schema), end)
        yield Tag("<|tool_call_begin|>", parts)


def _openai(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        yield Tag(
            " to=functions.", (name, OneOf((" ", "<|channel|>")), TextUntil("<|message|>"), Json(schema), "<|call|>")
        )


def _qwen3_coder(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        parts: list[Part] = [_LINE, f"<function={name}>\n"]
        if schema is _OBJECT:
            parts.append(TextUntil("</function>"))
        else:
            for key, value in argument_schemas(schema).items():
                parts += [f"<parameter={key}>\n", *_value(value, "\n</parameter>\n")]
            parts.append("</function>")
        yield Tag("<tool_call>", (*parts, _LINE, "</tool_call>"))


def _glm45(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        parts: list[Part] = [name, _LINE]
        if schema is _OBJECT:
            parts.append(TextUntil("</tool_call>"))
        else:
            for key, value in argument_schemas(schema).items():
                parts += [f"<arg_key>{key}</arg_key>", _LINE, "<arg_value>", *_value(value, "</arg_value>"), _LINE]
            parts.append("</tool_call>")
        yield Tag("<tool_call>", parts)


def _gemma4(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        if schema is _OBJECT:
            yield Tag("<|tool_call>", (f"call:{name}{{", TextUntil("<tool_call|>")))
        else:
            yield Tag("<|tool_call>", (f"call:{name}", *gemma_arguments(schema), "<tool_call|>"))


def _value(schema: Mapping[str, Any], end: str) -> list[Part]:
    """A text stands for itself, any other value is JSON."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return [OneOf([each for each in choices if each] or [""]), end]
    kinds = types_of(schema)
    return [TextUntil(end)] if not kinds or "string" in kinds else [Json(schema), end]


SYNTAXES: Mapping[str, Callable[[Schemas], Iterator[Tag]]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "gemma4": _gemma4,
    "glm45": _glm45,
    "hermes": _hermes,
    "kimi_k2": _kimi_k2,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "openai": _openai,
    "qwen3_coder": _qwen3_coder,
}
"""Tags by the names of tool_calls.PARSERS."""
