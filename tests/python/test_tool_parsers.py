"""Syntaxes of tool calls: the sum of what a reader finds never depends on how the text was cut."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvanta.parsers.call_reader import CallReader, Found
from kvanta.parsers.lenient_json import LenientJson
from kvanta.parsers.text_buffer import TextBuffer, overlap
from kvanta.parsers.tool_calls import PARSERS, whole_of
from kvanta.server.anthropic import messages_api

SCHEMAS = {
    "paint": {
        "type": "object",
        "properties": {
            "colour": {"type": "string"},
            "layers": {"type": "integer"},
            "share": {"type": "number"},
            "dry": {"type": "boolean"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["a", "b"]},
        },
    }
}
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENTS = '{"colour": "r\\"é}d", "layers": [1, {"a": "]"}]}'
PAINT = ("paint", ARGUMENTS)


def deepseek(*calls: tuple[str, str]) -> str:
    written = [f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}" for name, arguments in calls]
    return ALL_BEGIN + "\n".join(written) + ALL_END


def kimi(*calls: tuple[str, str]) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return KIMI_BEGIN + "".join(written) + KIMI_END


def qwen(name: str, **arguments: str) -> str:
    written = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(written)}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def harmony(*messages: str) -> str:
    return "<|start|>assistant".join(messages)


ANALYSIS = "<|channel|>analysis<|message|>The user wants paint.<|end|>"
FINAL = "<|channel|>final<|message|>Done.<|return|>"


def harmony_call(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


def gemma(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{{{arguments}}}<tool_call|>"


INFINITE = '<tool_call>{"name": "run", "arguments": {"to": NaN}}</tool_call>'
RUN = '{"to": -1.5e3, "by": null}'
GEMMA_JSON = '{"to": "a\\n\\u00e9\\\\q", "by": {"x": [1, "2"]}}'
GEMMA_KEYS = '{"to:": 1, "b:y": "a, \\"}", "c": "red"}'
# parser, text, content, calls
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("mistral", "No [TOOL_ call", "No [TOOL_ call", []),
    ("mistral", f"Yes.[TOOL_CALLS]paint{ARGUMENTS}", "Yes.", [PAINT]),
    ("mistral", f"[TOOL_CALLS]paint{ARGUMENTS}[TOOL_CALLS]walk{{}}", "", [PAINT, ("walk", "{}")]),
    ("mistral", f"[TOOL_CALLS]paint[CALL_ID]abc123xyz[ARGS]{ARGUMENTS} ", "", [PAINT]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "paint", "arguments": {ARGUMENTS}}}]', "", [PAINT]),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "walk", "arguments": {}}, {"name": "run", "arguments": {"to": 1}}]\nOk',
        "Ok",
        [("walk", "{}"), ("run", '{"to": 1}')],
    ),
    ("mistral", "[TOOL_CALLS]walk{}, ;\n[TOOL_CALLS]run{}", "", [("walk", "{}"), ("run", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "walk"}, {"name": "ru', "", [("walk", "{}")]),
    ("mistral", "[TOOL_CALLS]walk{}[TOOL_", "", [("walk", "{}")]),
    ("hermes", '<tool_call>{"name": "walk"}</tool_call>, <tool_call>{"na', "", [("walk", "{}")]),
    ("mistral", '[TOOL_CALLS]paint{"colour": "r', "", [("paint", '{"colour": "r')]),
    ("mistral", "[TOOL_CALLS] is a mark", "[TOOL_CALLS] is a mark", []),
    ("mistral", '[TOOL_CALLS][{"nam": 1}]', '[TOOL_CALLS][{"nam": 1}]', []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    ("mistral", '[TOOL_CALLS][{"name": "a"', '[TOOL_CALLS][{"name": "a"', []),
    ("gemma4", "a <|tool_", "a <|tool_", []),
    (
        "gemma4",
        "Yes.\n" + gemma("paint", 'colour:<|"|>r"é}d, a:b<|"|>,layers:[1,{a:<|"|>]<|"|>,b:{}},[]],dry:true'),
        "Yes.\n",
        [("paint", '{"colour": "r\\"é}d, a:b", "layers": [1, {"a": "]", "b": {}}, []], "dry": true}')],
    ),
    ("gemma4", gemma("walk", "") + gemma("run", "to: -1.5e3 , by:null") + " ", "", [("walk", "{}"), ("run", RUN)]),
    ("gemma4", gemma("run", '<|"|>to:<|"|>:1,"b:y":"a, \\"}",c:red,'), "", [("run", GEMMA_KEYS)]),
    ("gemma4", "<|tool_call>:walk{}<tool_call|><tool_call|>Ok", "Ok", [("walk", "{}")]),
    ("gemma4", '<|tool_call>call:run{to:<|"|>no', "", [("run", '{"to": "no')]),
    ("gemma4", '<|tool_call>call:run{to:<|"|>no<tool_call|>', "", [("run", '{"to": "no"}')]),
    ("gemma4", "<|tool_call>call:run{to:{a:[1,2<tool_call|>", "", [("run", '{"to": {"a": [1, 2]}}')]),
    ("gemma4", "<|tool_call>call:run{to<|tool_call>call:walk{}<tool_call|>", "", [("run", "{}"), ("walk", "{}")]),
    ("gemma4", "<|tool_call>call:run{to:<tool_call|>", "", [("run", '{"to": null}')]),
    ("gemma4", "<|tool_call>call:run{to:NaN,by:1e999}<tool_call|>", "", [("run", '{"to": null, "by": "1e999"}')]),
    (
        "gemma4",
        gemma("paint", 'colour:1.10,layers:<|"|>3<|"|>,share:0.5,dry:True,note:None,kind:b'),
        "",
        [("paint", '{"colour": "1.10", "layers": 3, "share": 0.5, "dry": true, "note": null, "kind": "b"}')],
    ),
    ("gemma4", gemma("run", '"to": "a\n\\u00e9\\q", "by": {"x": [1, "2"]}'), "", [("run", GEMMA_JSON)]),
    ("gemma4", "<|tool_call> is a mark", "<|tool_call> is a mark", []),
    ("gemma4", "<|tool_call>call:run<tool_call|>!", "<|tool_call>call:run!", []),
    ("deepseek_v3", f"Well.\n{deepseek(PAINT, ('walk', '{}'))}", "Well.\n", [PAINT, ("walk", "{}")]),
    ("deepseek_v3", f"{ALL_BEGIN}{BEGIN}function{SEP}walk\n```json\n{{}}\n```", "", [("walk", "{}")]),
    ("deepseek_v3", f"{ALL_BEGIN}hello", f"{ALL_BEGIN}hello", []),
    ("deepseek_v3", f"{ALL_BEGIN}{BEGIN}walk{END}{ALL_END}", f"{ALL_BEGIN}{BEGIN}walk{END}{ALL_END}", []),
    ("deepseek_v3", "a <｜tool▁", "a <｜tool▁", []),
    ("deepseek_v31", f"{ALL_BEGIN}{BEGIN}paint{SEP}{ARGUMENTS}{END}{ALL_END}", "", [PAINT]),
    (
        "deepseek_v31",
        f"{ALL_BEGIN}{BEGIN}walk{SEP}{{}}{END}{BEGIN}run{SEP}{END}{ALL_END}",
        "",
        [("walk", "{}"), ("run", "{}")],
    ),
    ("kimi_k2", f"I will.{kimi(PAINT, ('a.b', '{}'))}", "I will.", [PAINT, ("a.b", "{}")]),
    ("kimi_k2", f"{KIMI_BEGIN}{KIMI_END}", "", []),
    ("qwen3_coder", "x < y <tool_cal", "x < y <tool_cal", []),
    (
        "qwen3_coder",
        "I paint.\n" + qwen("paint", colour='a "b"\n\n  c </par', layers="3", dry="True", tags='["x"]'),
        "I paint.\n",
        [("paint", '{"colour": "a \\"b\\"\\n\\n  c </par", "layers": 3, "dry": true, "tags": ["x"]}')],
    ),
    ("qwen3_coder", qwen("walk") + "\n" + qwen("run", to="1"), "", [("walk", "{}"), ("run", '{"to": "1"}')]),
    (
        "qwen3_coder",
        qwen("paint", note="None", share="0.5", kind="a", layers="x"),
        "",
        [("paint", '{"note": null, "share": 0.5, "kind": "a", "layers": "x"}')],
    ),
    ("qwen3_coder", "<function=walk>\n</function> after", "after", [("walk", "{}")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=paint>\n<parameter=colour>\nred\n<parameter=layers>\n2\n</function>\n</tool_call>",
        "",
        [("paint", '{"colour": "red", "layers": 2}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=paint>\n<parameter=colour>\nre", "", [("paint", '{"colour": "re')]),
    ("qwen3_coder", "<tool_call> is a mark", "<tool_call> is a mark", []),
    ("qwen3_coder", "<tool_call><b></tool_call>", "<tool_call><b></tool_call>", []),
    (
        "glm45",
        "Hm.\n" + glm("paint", colour=" 3 ", layers="3", tags='{"a": NaN}') + "\n" + glm("walk"),
        "Hm.\n",
        [("paint", '{"colour": " 3 ", "layers": 3, "tags": "{\\"a\\": NaN}"}'), ("walk", "{}")],
    ),
    ("glm45", glm("run", to="1", far="true", why="so"), "", [("run", '{"to": 1, "far": true, "why": "so"}')]),
    (
        "glm45",
        glm("paint", share="1e999", tags="[-1e999]") + glm("run", to="1e999"),
        "",
        [("paint", '{"share": "1e999", "tags": ["-1e999"]}'), ("run", '{"to": "1e999"}')],
    ),
    ("hermes", INFINITE, "", [("run", '{"to": null}')]),
    ("llama3_json", '{"name": "run", "parameters": {"to": -Infinity}}', "", [("run", '{"to": null}')]),
    ("mistral", '[TOOL_CALLS][{"name": "run", "arguments": {"to": 1e999}}', "", [("run", '{"to": "1e999"}')]),
    ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
    ("openai", harmony(ANALYSIS, harmony_call(*PAINT)), "", [PAINT]),
    ("openai", harmony(ANALYSIS, FINAL), "Done.", []),
    ("openai", harmony(harmony_call("walk", "{}"), harmony_call(*PAINT)), "", [("walk", "{}"), PAINT]),
    (
        "openai",
        " to=functions.walk<|channel|>commentary json<|message|>{}<|call|>",
        "",
        [("walk", "{}")],
    ),
    (
        "openai",
        harmony("<|channel|>commentary<|message|>I look.<|end|>", FINAL),
        "I look.\nDone.",
        [],
    ),
    ("openai", "Plain text.", "Plain text.", []),
    ("openai", "<|channel|>ana", "", []),
]

# JSON as models write it -> the JSON that they mean.
LENIENT = {
    '{"to": "a\nb\tc"}': '{"to": "a\\nb\\tc"}',
    '{"to": "a",}': '{"to": "a"}',
    '{"to": [1, 2,], "by": {"x": 1,},}': '{"to": [1, 2], "by": {"x": 1}}',
    "{'to': 'it\\'s \"a\"', 'by': 'it's'}": '{"to": "it\'s \\"a\\"", "by": "it\'s"}',
    "{to: 1, by_x: true}": '{"to": 1, "by_x": true}',
    '{"to": True, "by": [None, False]}': '{"to": true, "by": [null, false]}',
    '{"to": "he said "no" twice", "by": 1}': '{"to": "he said \\"no\\" twice", "by": 1}',
    '{"to": "C:\\dir \\d+", "by": .5}': '{"to": "C:\\\\dir \\\\d+", "by": 0.5}',
    '{"to": "x"\n "by": {} "z": 2}': '{"to": "x", "by": {}, "z": 2}',
    '{"to": {"a": [1, 2}, "by": 3}': '{"to": {"a": [1, 2]}, "by": 3}',
    "{}": "{}",
}
WRAPPED = {
    "deepseek_v3": f"{ALL_BEGIN}{BEGIN}function{SEP}run\n```json\n{{}}\n```{END}{ALL_END}",
    "deepseek_v31": f"{ALL_BEGIN}{BEGIN}run{SEP}{{}}{END}{ALL_END}",
    "glm45": '<tool_call>{"name": "run", "arguments": {}}</tool_call>',
    "hermes": '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>',
    "kimi_k2": kimi(("run", "{}")),
    "llama3_json": '{"name": "run", "parameters": {}}',
    "mistral": "[TOOL_CALLS]run{}",
    "openai": "<|channel|>commentary to=functions.run <|constrain|>json<|message|>{}<|call|>",
    "qwen3_coder": '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>',
}


@pytest.mark.parametrize("more", ["", "}", "}]"], ids=["", "a brace too many", "two"])
@pytest.mark.parametrize("written", LENIENT)
@pytest.mark.parametrize("parser", WRAPPED)
def test_what_is_close_to_json_is_a_call(parser: str, written: str, more: str) -> None:
    """The arguments are JSON, however the text was cut."""
    before, after = WRAPPED[parser].split("{}", 1)
    text = before + written + more + after
    whole = summary(read(PARSERS[parser](), [text]))
    ((name, arguments),) = whole[1]
    assert (name, json.loads(arguments), whole[0]) == ("run", json.loads(LENIENT[written]), ""), text
    assert summary(read(PARSERS[parser](), list(text))) == whole


def test_every_parser_reads_what_is_close_to_json() -> None:
    assert {*WRAPPED, "gemma4"} == PARSERS.keys()


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (qwen("paint", colour="red", layers="3"), [("paint", '{"colour": "red", "layers": 3}')]),
        (glm("paint", colour="red", tags="['a', True]"), [("paint", '{"colour": "red", "tags": ["a", true]}')]),
        ('<tool_call>```json\n{"name": "run", "arguments": {}}\n```</tool_call>', [("run", "{}")]),
        ('<tool_call>{"name": "run", "arguments": {"to": 1}</tool_call>', [("run", '{"to": 1}')]),
        ('<tool_call>{"name": "run", "arguments": "{\\"to\\": 1}"}</tool_call>', [("run", '{"to": 1}')]),
        ('<tool_call>{"name": "run", "arguments": null}</tool_call>', [("run", "{}")]),
        ("<tool_call>{'name': 'run', 'arguments': {}}\n{'name': 'walk'}</tool_call>", [("run", "{}"), ("walk", "{}")]),
        ('<tool_call>{"name": "run", "arguments": {"to": "Ro', []),
        ('<tool_call>{"name": "run", "arguments": "Rome"}</tool_call>', []),
        ("<tool_call><function=paint>\n<parameter=colour>\nre", []),
    ],
)
def test_other_syntaxes_where_hermes_is_expected(text: str, calls: list[tuple[str, str]]) -> None:
    """A text that is cut off within a call stays a text."""
    found = summary(read(PARSERS["hermes"](schemas=SCHEMAS), list(text)))
    assert found[:2] == ("" if calls else text, calls)
    assert summary(read(PARSERS["hermes"](schemas=SCHEMAS, parallel=False), [text]))[1] == calls[:1]


@pytest.mark.parametrize(
    ("parser", "text", "closed"),
    [
        ("mistral", '[TOOL_CALLS]walk{}[TOOL_CALLS]run{"to": [1, "Ro', '{"to": [1, "Ro"]}'),
        ("qwen3_coder", qwen("walk") + "<tool_call>\n<function=run>\n<parameter=to>\nRo", '{"to": "Ro"}'),
        ("kimi_k2", kimi(("walk", "{}"), ("run", '{"to": ')).split("<|tool_call_end|><|tool_calls")[0], '{"to": null}'),
        ("gemma4", gemma("walk", "") + "<|tool_call>call:run{to:", '{"to": null}'),
        ("openai", harmony(harmony_call("walk", "{}"), harmony_call("run", "")).removesuffix("<|call|>"), "{}"),
    ],
)
def test_a_whole_text_that_ends_within_a_call(parser: str, text: str, closed: str) -> None:
    """A model that ends there has forgotten the end; a call that is cut off must not be made."""
    walk = ("walk", "{}")
    assert summary(whole_of(PARSERS[parser](), text, ended=True))[1] == [walk, ("run", closed)]
    calls = summary(whole_of(PARSERS[parser](), text, ended=False))[1]
    assert calls == ([walk, ("run", "{}")] if closed == "{}" else [walk])


def test_json_with_a_name_is_no_call() -> None:
    text = '{"name": "Rome", "people": 3}'
    assert summary(read(PARSERS["llama3_json"](schemas=SCHEMAS), [text])) == (text, [], "")


def read(reader: CallReader, pieces: list[str]) -> Found:
    found = Found()
    for piece in pieces:
        found.add(reader.take(piece))
    found.add(reader.end())
    return found


def summary(found: Found) -> tuple[str, list[tuple[str, str]], str]:
    assert [call["index"] for call in found.calls] == list(range(len(found.calls)))
    assert len({call["id"] for call in found.calls}) == len(found.calls)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.calls]
    return found.content, calls, found.reasoning


def cut(text: str, places: set[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_a_text_whole_and_by_characters(parser: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = summary(read(PARSERS[parser](schemas=SCHEMAS), [text]))
    assert whole[:2] == (content, calls)
    assert summary(read(PARSERS[parser](schemas=SCHEMAS), list(text))) == whole
    first = summary(read(PARSERS[parser](schemas=SCHEMAS, parallel=False), list(text)))
    assert first[1] == calls[:1]


@given(st.sampled_from(CASES), st.sets(st.integers(0, 300)))
def test_any_cuts(case: tuple[str, str, str, Any], places: set[int]) -> None:
    parser, text, content, calls = case
    assert summary(read(PARSERS[parser](schemas=SCHEMAS), cut(text, places)))[:2] == (content, calls)


PIECES = [
    *("[TOOL_CALLS]", "paint", "{", "}", "[", "]", '"', "\\", "\n", " ", "x", ":", ",", "[ARGS]", '{"name": "f"}'),
    *(ALL_BEGIN, ALL_END, BEGIN, END, SEP, "```json", "```", KIMI_BEGIN, KIMI_END, "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0", "<tool_call>", "</tool_call>", "<"),
    *("<function=paint>", "</function>", "<parameter=colour>", "<parameter=layers>", "</parameter>", ">", "1"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|start|>", "assistant", "<|channel|>", "analysis"),
    *("final", "commentary", " to=functions.f", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "null", "é"),
]


@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(PIECES), max_size=20), st.sets(st.integers(0, 200)))
@example("mistral", ["[TOOL_CALLS]", "{", "x"], {13})
def test_nonsense_is_read_the_same_however_it_is_cut(parser: str, pieces: list[str], places: set[int]) -> None:
    text = "".join(pieces)
    whole = summary(read(PARSERS[parser](schemas=SCHEMAS), [text]))
    assert summary(read(PARSERS[parser](schemas=SCHEMAS), cut(text, places))) == whole
    assert summary(read(PARSERS[parser](schemas=SCHEMAS), list(text))) == whole


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", f"[TOOL_CALLS]paint{ARGUMENTS}"),
        ("deepseek_v3", deepseek(PAINT)),
        ("kimi_k2", kimi(PAINT)),
        ("openai", harmony_call(*PAINT)),
        ("qwen3_coder", qwen("paint", colour="a long text, word by word")),
    ],
)
def test_arguments_come_as_they_are_written(parser: str, text: str) -> None:
    reader = PARSERS[parser](schemas=SCHEMAS)
    pieces = [reader.take(character) for character in text] + [reader.end()]
    deltas = [call for found in pieces for call in found.calls]
    assert len(deltas) > 10
    assert deltas[0]["function"]["name"] == "paint"
    assert all("name" not in delta["function"] and "id" not in delta for delta in deltas[1:])
    json.loads("".join(delta["function"]["arguments"] for delta in deltas))
    assert not any(found.content for found in pieces)


def test_messages_have_inputs_of_json_alone() -> None:
    assert messages_api._arguments('{"to": 1e9}') == {"to": 1e9}
    for text in ('{"to": NaN}', '{"to": [-Infinity]}', '{"to": 1e999}'):
        assert messages_api._arguments(text) == {}


def test_ids() -> None:
    (call,) = read(PARSERS["mistral"](), ["[TOOL_CALLS]walk{}"]).calls
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    (call,) = read(PARSERS["mistral"](), ["[TOOL_CALLS]walk[CALL_ID]abc123xyz[ARGS]{}"]).calls
    assert call["id"] == "abc123xyz"
    (call,) = read(PARSERS["kimi_k2"](), [kimi(("walk", "{}"))]).calls
    assert call["id"] == "functions.walk:0"


def test_a_function_that_is_not_offered_is_no_call_in_channels() -> None:
    text = harmony(ANALYSIS, harmony_call("walk", "{}"))
    found = read(PARSERS["openai"](may_call=False), [text])
    assert (found.calls, found.content, found.reasoning) == ([], "{}", "The user wants paint.")
    built_in = "<|channel|>commentary to=python<|message|>1 + 1<|call|>"
    assert read(PARSERS["openai"](), [built_in]) == Found(reasoning="1 + 1")


JSON = st.recursive(
    st.none() | st.booleans() | st.text() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(), JSON),
    st.text(),
    st.booleans(),
    st.sampled_from([None, 0, 3]),
    st.sets(st.integers(0, 300)),
)
def test_json_keeps_its_meaning(value: Any, rest: str, ascii_only: bool, indent: int | None, places: set[int]) -> None:
    """All of it but white space is as it came; the text after it is not read."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    reader = LenientJson()
    written = reader.take(text + rest)
    assert (json.loads(written), reader.ended, reader.rest) == (value, True, rest)
    in_pieces = LenientJson()
    assert "".join(in_pieces.take(piece) for piece in cut(text, places)) == written


@given(
    st.lists(st.sampled_from([*"{}[]\"'\\:,/ \n1a-.", "True", "null", "\\u00e", '<|"|>', "é"]), max_size=40),
    st.sets(st.integers(0, 60)),
)
def test_anything_becomes_json(parts: list[str], places: set[int]) -> None:
    text = "{" + "".join(parts)
    reader, in_pieces = LenientJson(), LenientJson()
    written = reader.take(text, final=True)
    assert isinstance(json.loads(written), dict)
    pieces = [in_pieces.take(piece) for piece in cut(text, places)]
    assert "".join([*pieces, in_pieces.take("", final=True)]) == written


@pytest.mark.parametrize("part", ['"a" ', "[", '"a": {', " ", '" "', "\\", "'", '{"a": 1}, '])
def test_the_time_is_linear(part: str) -> None:
    """Steps of the interpreter, not a clock."""

    def steps(count: int) -> int:
        reader, taken = LenientJson(), 0

        def step(*_: Any) -> Any:
            nonlocal taken
            taken += 1
            return step

        sys.settrace(step)
        try:
            for _ in range(count):
                reader.take(part)
        finally:
            sys.settrace(None)
        return taken

    assert steps(2000) < 2.5 * steps(1000) + 1000


@given(st.text("ab", max_size=12), st.integers(0, 12))
def test_a_mark_is_found_where_it_first_stands(text: str, place: int) -> None:
    buffer = TextBuffer()
    buffer.add(text[:place])
    early = buffer.find(("aab",))
    buffer.add(text[place:])
    found = early or buffer.find(("aab",))
    assert (found[0] if found else -1) == text.find("aab")
    assert overlap(text, "aab") == max(n for n in range(4) if text.endswith("aab"[:n]))
