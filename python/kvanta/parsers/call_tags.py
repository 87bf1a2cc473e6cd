"""Constraints for calls that a model writes without being forced to, in the syntax that `--tool-call-parser` names.

With `strict` functions, a call is one of the given functions once it has begun, and the arguments of strict ones match
their schemas, as in OpenAI's API, vLLM and SGLang. Arguments of other functions are any object. Where the answer must
be JSON or a call, the arguments of every function match their schemas: nothing in such an answer is without a bound but
the contents of texts. An answer that may have one call ends with it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from kvanta.constraints.json_schema import rebased
from kvanta.errors import InputError
from kvanta.params.structural_tag import Json, Maybe, OneOf, Part, StructuralTag, Tag, TextUntil
from kvanta.params.structured_outputs import StructuredOutputsParams
from kvanta.parsers.gemma_schemas import gemma_arguments
from kvanta.parsers.harmony import HARMONY_PARSER
from kvanta.parsers.lenient_json import types_of
from kvanta.parsers.section_calls import DeepSeekV3Calls, DeepSeekV31Calls, KimiK2Calls
from kvanta.parsers.tools import Tools, call_list_schema, call_schema
from kvanta.parsers.xml_calls import argument_schemas

_OBJECT: Mapping[str, Any] = {"type": "object"}
_LINE = OneOf(("\n", ""))
_SPACE = OneOf((" ", ""))
_MAX_GUIDED = 2**15
"""Characters of all schemas, up to which the arguments of functions that are not strict match them, too."""
_HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
Schemas = Mapping[str, Mapping[str, Any]]


def constrain_calls(tools: Tools, parser: str, given: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """The constraint of an answer that may be, or have, calls.

    `parser`: a name of PARSERS, or empty. `given`: the request's for the text: JSON, or a call instead of it.
    """
    syntax = SYNTAXES.get(parser)
    if syntax is None or not tools.may_call:
        return given
    one = not tools.parallel
    if given is None:
        if not tools.strict and not (one and _HAS_GRAMMARS):
            return None
        tags = list(syntax(_own_schemas(tools, tools.strict)))
        return StructuredOutputsParams(structural_tag=StructuralTag(tags, at_most_one=one))
    # Calls of GPT-OSS are not in the channel of the answer.
    if given.kind not in ("json", "json_object") or parser == HARMONY_PARSER:
        return given
    schema = _OBJECT if given.json is None else given.json
    every = sum(len(str(each)) for each in tools.functions.values()) <= _MAX_GUIDED
    schemas = _own_schemas(tools, tools.functions.keys() if every else tools.strict)
    if parser == "llama3_json":  # a call is JSON as well
        return dataclasses.replace(given, json=_json_or_call(schema, schemas), json_object=False)
    tags = [dataclasses.replace(tag, alone=True) for tag in syntax(schemas)]
    tag = StructuralTag(tags, instead=Json(schema), at_most_one=one, section=_SECTIONS.get(parser, ("", "")))
    return dataclasses.replace(given, json=None, json_object=False, structural_tag=tag)


def _own_schemas(tools: Tools, names: Collection[str]) -> Schemas:
    """The schemas of the arguments of these functions, and any object for the others."""
    return {name: schema if name in names else _OBJECT for name, schema in tools.functions.items()}


def _json_or_call(given: str | Mapping[str, Any], functions: Schemas) -> dict[str, Any]:
    """The schema of a text that is JSON of the given one, or a call. Raises InputError for a text that is no schema."""
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        if not isinstance(schema, Mapping):
            raise ValueError
    except (ValueError, RecursionError):
        raise InputError("json is not a JSON schema", "json") from None
    call = call_schema(functions, ("name", "parameters"), "#/anyOf/1")
    return {"anyOf": [rebased(schema, "#/anyOf/0"), call]}


def _hermes(schemas: Schemas) -> Iterator[Tag]:
    """Some models write the arguments first."""
    for name, schema in schemas.items():
        for order in (("name", "arguments"), ("arguments", "name")):
            yield Tag("<tool_call>", (_LINE, Json(call_schema({name: schema}, order, "#")), _LINE, "</tool_call>"))


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
                parts += _needed(schema, key, [f"<parameter={key}>\n", *_value(value, "\n</parameter>\n")])
            parts.append("</function>")
        yield Tag("<tool_call>", (*parts, _LINE, "</tool_call>"))


def _glm45(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        parts: list[Part] = [name, _LINE]
        if schema is _OBJECT:
            parts.append(TextUntil("</tool_call>"))
        else:
            for key, value in argument_schemas(schema).items():
                written = [f"<arg_key>{key}</arg_key>", _LINE, "<arg_value>", *_value(value, "</arg_value>"), _LINE]
                parts += _needed(schema, key, written)
            parts.append("</tool_call>")
        yield Tag("<tool_call>", parts)


def _gemma4(schemas: Schemas) -> Iterator[Tag]:
    for name, schema in schemas.items():
        if schema is _OBJECT:
            yield Tag("<|tool_call>", (f"call:{name}{{", TextUntil("<tool_call|>")))
        else:
            yield Tag("<|tool_call>", (f"call:{name}", *gemma_arguments(schema), "<tool_call|>"))


def _needed(schema: Mapping[str, Any], key: str, parts: list[Part]) -> list[Part]:
    """The parts of an argument, which may be missing if the schema does not require it."""
    required = schema.get("required")
    return parts if isinstance(required, list) and key in required else [Maybe(parts)]


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
_SECTIONS: Mapping[str, tuple[str, str]] = {
    "deepseek_v3": (DeepSeekV3Calls.section_begin, DeepSeekV3Calls.section_end),
    "deepseek_v31": (DeepSeekV31Calls.section_begin, DeepSeekV31Calls.section_end),
    "kimi_k2": (KimiK2Calls.section_begin, KimiK2Calls.section_end),
}
"""Marks around calls."""
