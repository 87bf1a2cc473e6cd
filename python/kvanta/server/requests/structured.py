"""Structured output in requests, in the fields of OpenAI, vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvanta.constraints.loose_schema import loosened_keywords
from kvanta.errors import InputError, about
from kvanta.params.checks import one_line
from kvanta.params.structured_outputs import KINDS, StructuredOutputsParams
from kvanta.server.http.hints import note

# Fields of other servers -> ours.
FIELDS: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_SWITCHES = ("disable_additional_properties", "disable_any_whitespace")
_FORMATS = (
    "{'type': 'text'}, {'type': 'json_object', 'schema': ...}, {'type': 'json_schema', 'json_schema': "
    "{'schema': ...}} or "
    "{'type': 'structural_tag', 'structures': [...], 'triggers': [...]}"
)


def read_structured_outputs(response_format: Any, others: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The constraint; None: any text. `others`: the request's other fields. Raises InputError that names the field."""
    requested: dict[str, dict[str, Any]] = {}
    if response_format is not None:
        with about("response_format"):
            constraint = _of_openai(response_format)
        if constraint:
            requested["response_format"] = constraint
    outputs = others.get("structured_outputs")
    if outputs is not None:
        with about("structured_outputs"):
            requested["structured_outputs"] = _of_vllm(outputs)
    for name, field in FIELDS.items():
        if others.get(name) is not None:
            requested[name] = {field: others[name]}
    if not requested:
        return None
    if len(requested) > 1:
        raise InputError(f"{' and '.join(requested)} exclude each other", next(iter(requested)))
    ((name, constraint),) = requested.items()
    try:
        return StructuredOutputsParams(**constraint)
    except InputError as error:
        raise InputError(str(error) if error.field == name else f"{name}: {error}", name) from None


def note_loosened(structured_outputs: StructuredOutputsParams, field: str) -> None:
    """Names the keywords of schemas that the grammar does not hold the text to. `field`: of the request."""
    for keyword in loosened_keywords(structured_outputs.schemas):
        note(f"{field}.{keyword.removeprefix('$')}", "a grammar cannot hold a text to all of it")


def _of_openai(requested: Any) -> dict[str, Any]:
    kind = requested.get("type") if isinstance(requested, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = requested.get("schema")  # llama.cpp's and Together's
        if isinstance(schema, Mapping):
            return {"json": schema}
        if schema is None:
            return {"json_object": True}
    if kind == "json_schema":
        described = requested.get("json_schema", requested)  # or all of it at the top, as in llama.cpp
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if isinstance(described, Mapping) and isinstance(schema, Mapping):
            return {"json": schema}
    if kind == "structural_tag":
        return {"structural_tag": requested}
    raise InputError(f"response_format is {one_line(requested)}; known: {_FORMATS}")


def _of_vllm(requested: Any) -> dict[str, Any]:
    if not isinstance(requested, Mapping):
        raise InputError(
            f"structured_outputs must be an object with one of {', '.join(KINDS)}, got {one_line(requested)}"
        )
    given = {
        name: value
        for name, value in requested.items()
        if value is not None and (value is not False or name in _SWITCHES)
    }
    known = (*KINDS, *_SWITCHES, "whitespace_pattern")
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise InputError(f"structured_outputs has {unknown[0]!r}; known: {', '.join(known)}")
    return given
