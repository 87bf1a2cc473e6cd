"""Unforced calls of strict functions: their arguments match the functions' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from live_server import LiveServer, error_of, live_server

from kvanta.constraints.json_schema import close_objects
from kvanta.constraints.structural_tag import lark_grammar
from kvanta.constraints.structured_output import StructuredOutputsConfig
from kvanta.errors import InputError
from kvanta.params.structural_tag import Json, StructuralTag, Tag
from kvanta.params.structured_outputs import StructuredOutputsParams
from kvanta.parsers import call_tags
from kvanta.parsers.call_tags import constrain_calls
from kvanta.parsers.tool_calls import PARSERS, rest_of
from kvanta.parsers.tools import Tools

llguidance = pytest.importorskip("llguidance")

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": ["integer", "null"]},
        "unit": {"$ref": "#/$defs/Unit"},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"type": "string", "enum": ["kelvin", "celsius"]}},
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "strict": True, "parameters": PARAMETERS},
}
WALK = {"type": "function", "function": {"name": "walk"}}
TOOLS = [WEATHER, WALK]
ARGUMENTS = '{"city": "Ürümqi", "days": 5, "unit": "kelvin"}'
XML = (
    "{begin}weather{sep}{key}city{value}Ürümqi{end}{key}days{value}5{end}{key}unit{value}kelvin{end}{close}</tool_call>"
)
QWEN = {
    "begin": "<tool_call>\n<function=",
    "sep": ">\n",
    "key": "<parameter=",
    "value": ">\n",
    "end": "\n</parameter>\n",
    "close": "</function>\n",
}
GLM = {
    "begin": "<tool_call>",
    "sep": "\n",
    "key": "<arg_key>",
    "value": "</arg_key>\n<arg_value>",
    "end": "</arg_value>\n",
    "close": "",
}
DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
# A call of `weather` in each syntax, with what may stand around it.
WRITTEN: list[tuple[str, str]] = [
    ("hermes", f'So: <tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\nThat is all.'),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>'),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "walk", "parameters": {{}}}}'),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]'),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]walk{{}}"),
    ("deepseek_v3", "{0}function{1}weather\n```json\n{3}\n```{2}".format(*DEEPSEEK, ARGUMENTS)),
    ("deepseek_v31", "{0}weather{1}{3}{2}".format(*DEEPSEEK, ARGUMENTS)),
    ("kimi_k2", "{0}functions.weather:0{1}{3}{2}".format(*KIMI, ARGUMENTS)),
    ("openai", f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"),
    ("openai", f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"),
    ("gemma4", '<|tool_call>call:weather{city:<|"|>Ürümqi<|"|>,days:5,unit:<|"|>kelvin<|"|>}<tool_call|>'),
    ("qwen3_coder", XML.format(**QWEN)),
    ("glm45", XML.format(**GLM)),
]


class Vocabulary:
    """A token for each byte, and the marks as special tokens."""

    def __init__(self, marks: Sequence[str]) -> None:
        self.special = {mark: 257 + index for index, mark in enumerate(marks)}
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"</s>", *map(str.encode, marks)]
        self.eos_token_id, self.bos_token_id = 256, None
        self.special_token_ids = [256, *self.special.values()]

    def __call__(self, text: str) -> list[int]:
        marks = re.compile("(" + "|".join(map(re.escape, self.special)) + ")") if self.special else None
        pieces = marks.split(text) if marks else [text]
        return [
            token for piece in pieces for token in ([self.special[piece]] if piece in self.special else piece.encode())
        ]


def length_allowed(constraint: StructuredOutputsParams | None, text: str, marks: Sequence[str]) -> tuple[bool, int]:
    """The grammar takes the text, as a whole one; tokens of it that it takes."""
    assert constraint is not None
    vocabulary = Vocabulary(marks)
    ends = [256, vocabulary.special.get("<|call|>", 256)]  # it ends the texts of GPT-OSS
    tokens = [token for token in vocabulary(text) if token not in ends]
    options = {"x-guidance": StructuredOutputsConfig().overrides(constraint)}
    if isinstance(constraint.structural_tag, StructuralTag):
        lark = lark_grammar(
            constraint.structural_tag,
            vocabulary.special,
            ends,
            lambda schema: json.dumps({**schema, **options}),  # type: ignore[dict-item]
        )
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    else:
        assert isinstance(constraint.json, Mapping)
        schema = {**close_objects(constraint.json), **options}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=[256])
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and matcher.is_accepting(), taken


@pytest.mark.parametrize("special", [False, True], ids=["words", "special tokens"])
@pytest.mark.parametrize(("parser", "text"), WRITTEN)
def test_calls_match_their_schemas(parser: str, text: str, special: bool) -> None:
    """The same text with another unit stops where the unit does; so does a function that does not exist."""
    marks = getattr(PARSERS[parser], "marks", ()) if special else ()
    constraint = constrain_calls(Tools.read(TOOLS, None, None), parser, None)
    whole, taken = length_allowed(constraint, text, marks)
    assert whole
    assert not length_allowed(constraint, text.replace("kelvin", "newton"), marks)[0]
    assert length_allowed(constraint, text.replace("kelvin", "newton"), marks)[1] < taken
    assert not length_allowed(constraint, text.replace("weather", "whether"), marks)[0]
    if special or parser != "openai":  # what is read is the call
        reader = PARSERS[parser](schemas=Tools.read(TOOLS, None, None).schemas)
        call = rest_of(reader, text).calls[0]["function"]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", json.loads(ARGUMENTS))


def test_every_syntax_can_be_constrained() -> None:
    assert call_tags.SYNTAXES.keys() == PARSERS.keys()
    assert {parser for parser, _ in WRITTEN} == PARSERS.keys()


@pytest.mark.parametrize("parser", PARSERS)
def test_other_texts_are_free(parser: str) -> None:
    constraint = constrain_calls(Tools.read(TOOLS, "auto", None), parser, None)
    assert length_allowed(constraint, 'Nothing <b> {"x": 1}\n[1] functions. é', ())[0]
    assert length_allowed(constraint, "", ())[0]


def test_arguments_of_other_functions_are_free() -> None:
    constraint = constrain_calls(Tools.read(TOOLS, None, None), "hermes", None)
    walk = '<tool_call>\n{"name": "walk", "arguments": {"far": [1, null]}}\n</tool_call>'
    assert length_allowed(constraint, walk, ())[0]


def test_calls_are_unconstrained_without_strict_functions_or_a_parser() -> None:
    assert constrain_calls(Tools.read([WALK], None, None), "hermes", None) is None
    assert constrain_calls(Tools.read(TOOLS, None, None), "", None) is None
    assert constrain_calls(Tools.read(TOOLS, "none", None), "hermes", None) is None
    assert constrain_calls(Tools.read([WALK], None, True), "hermes", None) is None


@pytest.mark.parametrize("parser", PARSERS)
def test_an_answer_that_may_have_one_call_ends_with_it(parser: str) -> None:
    text = next(text for name, text in WRITTEN if name == parser).removeprefix("So: ").removesuffix("\nThat is all.")
    text = text.split("[TOOL_CALLS]walk")[0].split("; {")[0]
    given = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    for constraint in (
        constrain_calls(Tools.read(TOOLS, None, False), parser, None),
        constrain_calls(
            Tools.read([{**WEATHER, "function": {**WEATHER["function"], "strict": False}}], None, False), parser, None
        ),
        constrain_calls(Tools.read(TOOLS, None, False), parser, given),
    ):
        if constraint is None or constraint.structural_tag is None:
            continue
        assert length_allowed(constraint, text, ())[0]
        for more in (text, " and more"):
            assert not length_allowed(constraint, text + more, ())[0]


def gemma_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


NODE = gemma_object({"next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}, "B": {"type": "number"}})
A = {"$ref": "#/$defs/A"}
LETTERS = {"type": "array", "items": {"type": ["string", "boolean"]}}
BRANCHES = gemma_object({f"p{i}": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]} for i in range(6)})
# A schema, arguments that it allows, and some that it does not.
GEMMA_CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        gemma_object({"z": LETTERS, "a": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": NODE}}),
        [
            '{a:{B:1.5,next:{"next": null, "B": 2}},z:[<|"|>x, y<|"|>,true]}',
            "{a:{B:1,next:null},z:[]}",
        ],
        ["{a:{B:1,next:null},z:[1]}", "{a:{B:true,next:null},z:[]}", "{a:{B:1,next:null},y:[]}"],
    ),
    (
        gemma_object({"a": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": BRANCHES}}),
        ["{a:{p0:null,p1:null,p2:null,p3:null,p4:null,p5:null}}"],
        ["{a:{p0:1,p1:null,p2:null,p3:null,p4:null,p5:null}}"],
    ),
    (gemma_object({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}), ['{"next": {"next": null}}'], ["{next:1}"]),
    (
        gemma_object({"og:title": {"type": "string"}, " a": {"const": "x"}, "": {"type": "null"}}),
        ['{<|"|><|"|>:null,<|"|> a<|"|>:<|"|>x<|"|>,<|"|>og:title<|"|>:<|"|>t<|"|>}'],
        ['{:null, a:<|"|>x<|"|>,og:title:<|"|>t<|"|>}'],
    ),
    (
        gemma_object(
            {
                "a": {"type": "array", "items": {"type": "string"}, "minItems": 2},
                "b": {"type": "string", "pattern": "^x+$"},
            }
        ),
        ['{a:["y", "z"],b:"xx"}'],
        ['{a:["y"],b:"xx"}', '{a:["y", "z"],b:"xy"}', '{a:[<|"|>y<|"|>],b:"x"}'],
    ),
    (
        gemma_object({"a": {"type": "string"}}),
        ['{a:<|"|>any {text}, "quoted"<|"|>}'],
        ['{a:<|"|>x<tool_call|>y<|"|>}', '{a:<|"|>x<|tool_call>y<|"|>}'],
    ),
    (
        gemma_object(
            {"a": {"properties": {"x": {"$ref": "#/$defs/A"}}, "required": ["x"], "additionalProperties": False}}
        )
        | {"$defs": {"A": {"enum": ["b", 5, None]}}},
        ['{a:{x:<|"|>b<|"|>}}', "{a:{x:5}}", "{a:{x:null}}"],
        ["{a:{x:6}}"],
    ),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), GEMMA_CASES)
def test_arguments_in_the_syntax_of_gemma(schema: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    """Lists, objects in each other, keys with marks; in JSON what the syntax cannot say."""
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    constraint = constrain_calls(Tools.read([tool], None, None), "gemma4", None)
    marks = PARSERS["gemma4"].marks  # type: ignore[attr-defined]
    for words in allowed:
        text = f"<|tool_call>call:f{words}<tool_call|>"
        assert length_allowed(constraint, text, marks)[0], words
        arguments = json.loads(rest_of(PARSERS["gemma4"](), text).calls[0]["function"]["arguments"])
        assert sorted(arguments) == sorted(schema["properties"])
    for words in refused:
        assert not length_allowed(constraint, f"<|tool_call>call:f{words}<tool_call|>", marks)[0], words


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"type": "object", "properties": None, "additionalProperties": False},
        {"type": "object", "properties": ["a"], "additionalProperties": False},
    ],
)
def test_odd_schemas_end(parameters: Any) -> None:
    """Whatever the compiler of the grammar says of them."""
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    assert constrain_calls(Tools.read([tool], None, None), "gemma4", None) is not None


JSON_OR_CALL = sorted(PARSERS.keys() - {"openai"})
"""Calls of GPT-OSS stand in a channel of their own, outside of the form."""


def json_or_call(parser: str, schema: Any, tools: Any = TOOLS) -> StructuredOutputsParams | None:
    return constrain_calls(Tools.read(tools, None, None), parser, StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("parser", JSON_OR_CALL)
def test_white_space_around_calls_has_a_bound(parser: str) -> None:
    """Also within a text that is an argument in the syntaxes of tags; in JSON, texts are as their schema says."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    call = next(text for name, text in WRITTEN if name == parser).removeprefix("So: ").removesuffix("\nThat is all.")
    strict = {**WEATHER["function"], "strict": False}
    constraint = json_or_call(parser, schema, [{"type": "function", "function": strict}, WALK])
    for text in ('{"a": 5}', call):
        for end in range(0, len(text) + 1, 3):
            before = text[:end]
            if before.replace('<|"|>', "").count('"') % 2 == 1:
                continue
            for space in ("\u205f", " ", "\n", "\n\t", "\xa0"):
                taken = length_allowed(constraint, before + space * 300, ())[1]
                assert taken < len((before + space * 299).encode()), (before, space)


@pytest.mark.parametrize("parser", JSON_OR_CALL)
def test_a_text_of_a_form_may_be_a_call_instead(parser: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = next(text for name, text in WRITTEN if name == parser).removeprefix("So: ").removesuffix("\nThat is all.")
    constraint = json_or_call(parser, schema)
    text = text.split("; {")[0]  # one call where it is JSON as well
    for allowed in ('{"a": 5}', text):
        assert length_allowed(constraint, allowed, ())[0], allowed
    for refused in ("No.", '{"a": "b"}', f"No. {text}", text.replace("kelvin", "newton")):
        assert not length_allowed(constraint, refused, ())[0], refused


def test_many_large_functions_stay_within_a_grammar() -> None:
    """Their arguments are any object."""
    schema = {"type": "object", "properties": {f"p{index}": {"enum": ["x" * 90]} for index in range(99)}}
    tools = [{"type": "function", "function": {"name": f"f{index}", "parameters": schema}} for index in range(40)]
    for parser in JSON_OR_CALL:
        constraint = json_or_call(parser, {"const": 1}, tools)
        assert constraint is not None
        assert sum(len(str(each)) for each in constraint.schemas) < 50_000


def test_a_form_stays_alone_without_functions() -> None:
    constraint = StructuredOutputsParams(json_object=True)
    assert constrain_calls(Tools.read(None, None, None), "hermes", constraint) is constraint


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("{", "JSON"),
        ({"structures": []}, "structures"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b>"]}, "triggers"),
        ({"structures": [{"begin": "<a>", "schema": 5, "end": ""}], "triggers": ["<a>"]}, "schema"),
        ({"structures": [{"begin": "<a>", "end": 5}], "triggers": ["<a>"]}, "end"),
        ({"structures": [{"begin": "<a>"}] * 1025, "triggers": ["<a>"]}, "1024"),
    ],
)
def test_wrong_structural_tags(given: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        StructuredOutputsParams(structural_tag=given)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(tool_call_parser="hermes") as live:
        yield live


CHAT = [{"role": "user", "content": "Once upon a time, there was a little girl named Lily."}]
STORY = {"messages": CHAT, "max_tokens": 120, "temperature": 0, "add_generation_prompt": False}


def test_a_structural_tag_of_a_request(server: LiveServer) -> None:
    """JSON of the schema follows the trigger, which the model writes soon; the rest is a story."""
    structure = {"begin": " to be", "schema": {"enum": ["kelvin"]}, "end": "!"}
    tag = {"structures": [structure], "triggers": [" to"]}
    answers = [
        server.post("/v1/chat/completions", **STORY, structured_outputs={"structural_tag": json.dumps(tag)}),
        server.post("/v1/chat/completions", **STORY, response_format={"type": "structural_tag", **tag}),
    ]
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    assert ' to be"kelvin"!' in texts[0]
    assert texts[0].count(" to") == texts[0].count(' to be"kelvin"!')
    assert "kelvin" not in server.post("/v1/chat/completions", **STORY).json()["choices"][0]["message"]["content"]


def test_strict_functions_reach_the_engine(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def syntax(schemas: call_tags.Schemas) -> Iterator[Tag]:
        for name, schema in schemas.items():
            yield Tag(" to", (f" {name}", Json(schema)))

    monkeypatch.setattr(call_tags, "SYNTAXES", {"hermes": syntax})
    answers = [
        server.post("/v1/chat/completions", **STORY, tools=TOOLS, tool_choice=choice).json()["choices"][0]["message"]
        for choice in ("auto", "none")
    ]
    assert re.search(r' to (weather\{\s*"city"|walk\{)', answers[0]["content"])
    assert "weather" not in answers[1]["content"]


def test_a_schema_that_cannot_be_used_is_told(server: LiveServer) -> None:
    parameters = {
        **PARAMETERS,
        "properties": {**PARAMETERS["properties"], "city": {"type": "string", "pattern": "(a"}},
    }
    tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": parameters}}
    error = error_of(server.post("/v1/chat/completions", messages=CHAT, tools=[tool]))
    assert error["param"] == "tools"
    assert error["message"].startswith("tools: structural_tag cannot be used")
