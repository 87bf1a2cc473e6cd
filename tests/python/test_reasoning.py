"""Reasoning apart from answers: in texts however they are cut, in prompts, in grammars, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer, live_server
from test_tool_parsers import ANALYSIS, FINAL, cut, harmony, harmony_call, summary

from kvanta.checkpoint.resolve import SHIPPED
from kvanta.constraints.reasoning_gate import GatedMatcher, ReasoningGate
from kvanta.errors import InputError
from kvanta.parsers import reasoning
from kvanta.parsers.answer import AnswerParsers, AnswerShape
from kvanta.parsers.call_reader import Found, TextReader
from kvanta.parsers.gemma_calls import Gemma4Calls
from kvanta.parsers.harmony import MARKS, HarmonyReader
from kvanta.parsers.reasoning import FORMATS, Begin, ReasoningCount, ReasoningFormat, ThinkReader, first_state
from kvanta.parsers.tool_calls import HermesCalls
from kvanta.parsers.xml_calls import QwenCoderCalls
from kvanta.server.options import read_options
from kvanta.server.requests.prompts import template_variables
from kvanta.server.requests.protocol import ChatRequest
from kvanta.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Where is Lily?"}]
TOOLS = [{"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}]
THINK, MISTRAL, GEMMA = FORMATS["qwen3"], FORMATS["mistral"], FORMATS["gemma4"]
CALL = '<tool_call>\n{"name": "walk", "arguments": {}}\n</tool_call>'


def read(reader: TextReader, pieces: list[str]) -> Found:
    found = Found()
    for piece in pieces:
        found.add(reader.take(piece))
    found.add(reader.end())
    return found


# format, begin, text, reasoning, content
CASES: list[tuple[ReasoningFormat, Begin, str, str, str]] = [
    (THINK, Begin.REASONING, "I think.</think>\n\nYes.", "I think.", "\n\nYes."),
    (THINK, Begin.REASONING, "<think>\nI think.\n</think>Yes.", "\nI think.\n", "Yes."),
    (THINK, Begin.REASONING, "\n<think></think>\nYes.", "", "\nYes."),
    (THINK, Begin.REASONING, "I <b>think</th", "I <b>think</th", ""),
    (THINK, Begin.REASONING, " <thin", " <thin", ""),
    (THINK, Begin.CONTENT, "No </think> here", "", "No </think> here"),
    (MISTRAL, Begin.EITHER, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    (MISTRAL, Begin.EITHER, "Well [THINK]Hm.[/THINK]Yes [THINK].", "Hm.", "Well Yes [THINK]."),
    (MISTRAL, Begin.EITHER, "Yes.[/THINK", "", "Yes.[/THINK"),
    (GEMMA, Begin.EITHER, "<|channel>thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    (GEMMA, Begin.EITHER, "<|channel>thou<channel|>Yes.", "thou", "Yes."),
    (GEMMA, Begin.EITHER, "<|channel>thought<channel|>Yes.", "", "Yes."),
    (GEMMA, Begin.EITHER, "<|channel>thought\nA<|channel>thought\nB<channel|>Yes.", "AB", "Yes."),
    (GEMMA, Begin.EITHER, "Yes.<|channel>thought\n<channel|><channel|> No.", "", "Yes. No."),
    (GEMMA, Begin.EITHER, "Yes<|channel>thought\nA<channel|>, <|channel>B<channel|>no.", "AB", "Yes, no."),
    (GEMMA, Begin.REASONING, "thought\nHm.<channel|>Yes.", "Hm.", "Yes."),
    (GEMMA, Begin.CONTENT, "Yes.<|channel>thought\n<channel|>", "", "Yes."),
]


@pytest.mark.parametrize(("form", "begin", "text", "thought", "said"), CASES)
def test_a_text_whole_and_by_characters(
    form: ReasoningFormat, begin: Begin, text: str, thought: str, said: str
) -> None:
    for pieces in ([text], list(text)):
        assert read(ThinkReader(form, begin), pieces) == Found(content=said, reasoning=thought)


@given(st.sampled_from(CASES), st.sets(st.integers(0, 40)))
def test_any_cuts(case: tuple[ReasoningFormat, Begin, str, str, str], places: set[int]) -> None:
    form, begin, text, thought, said = case
    assert read(ThinkReader(form, begin), cut(text, places)) == Found(content=said, reasoning=thought)


@given(st.sets(st.integers(0, 200)))
def test_channels(places: set[int]) -> None:
    text = harmony(ANALYSIS, ANALYSIS, "<|channel|>commentary<|message|>I look.<|end|>", harmony_call("walk", "{}"))
    found = summary(read(HarmonyReader(), cut(text, places)))
    assert found == ("I look.", [("walk", "{}")], "The user wants paint.\nThe user wants paint.")


@pytest.mark.parametrize("text", [f"I must walk.</think>\n\n{CALL}", f"<think>I must walk.{CALL}"])
def test_calls_after_reasoning(text: str) -> None:
    for pieces in ([text], list(text)):
        reader = ThinkReader(THINK, Begin.REASONING, HermesCalls(), ends_at_calls=True)
        assert summary(read(reader, pieces)) == ("", [("walk", "{}")], "I must walk.")
        assert reader.calls == 1


def test_reasoning_may_mention_a_call() -> None:
    reader = ThinkReader(THINK, Begin.REASONING, QwenCoderCalls(), ends_at_calls=True)
    assert read(reader, ["I could use <tool_call> here.</think>No."]) == Found(
        "No.", [], "I could use <tool_call> here."
    )


@pytest.mark.parametrize(
    ("name", "prompt", "variables", "continues", "begin"),
    [
        ("qwen3", "<|im_start|>assistant\n", {}, False, Begin.REASONING),
        ("qwen3", "<|im_start|>assistant\n<think>\n", {}, False, Begin.REASONING),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", {"enable_thinking": False}, False, Begin.CONTENT),
        ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": False}, False, Begin.CONTENT),
        ("qwen3", "assistant\n<think>\nI", {}, True, Begin.REASONING),
        ("qwen3", "assistant\n<think>\nI\n</think>\n\nYes", {}, True, Begin.CONTENT),
        ("qwen3", "assistant\nYes", {}, True, Begin.CONTENT),
        ("deepseek_r1", "<｜Assistant｜>", {"enable_thinking": False}, False, Begin.REASONING),
        ("deepseek_v3", "<｜Assistant｜></think>", {}, False, Begin.CONTENT),
        ("deepseek_v3", "<｜Assistant｜><think>", {"thinking": True}, False, Begin.REASONING),
        ("deepseek_v3", "<｜Assistant｜>", {}, False, Begin.CONTENT),
        ("glm45", "<|assistant|>", {}, False, Begin.REASONING),
        ("mistral", "[/INST]", {}, False, Begin.EITHER),
        ("gemma4", "<|turn>model\n", {"enable_thinking": True}, False, Begin.EITHER),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", {}, False, Begin.CONTENT),
        ("gemma4", "<|turn>model\n<|channel>thought\n", {}, False, Begin.REASONING),
        ("gemma4", "<|turn>model\n<|channel>thought\nHm", {}, True, Begin.REASONING),
    ],
)
def test_what_the_prompt_shows(
    name: str, prompt: str, variables: dict[str, Any], continues: bool, begin: Begin
) -> None:
    assert first_state(FORMATS[name], prompt, variables, continues=continues) is begin


@pytest.mark.parametrize(
    ("prompt", "text", "found"),
    [
        (
            "<|start|>user<|message|>Hi<|end|><|start|>assistant",
            harmony(ANALYSIS, FINAL),
            ("Done.", "The user wants paint."),
        ),
        ("<|start|>assistant<|channel|>final<|message|>It is", " so.<|return|>", (" so.", "")),
        ("<|start|>assistant<|channel|>analysis", "<|message|>Hm<|end|>", ("", "Hm")),
        ("no channels", FINAL, ("Done.", "")),
    ],
)
def test_channels_go_on_where_the_prompt_ends(prompt: str, text: str, found: tuple[str, str]) -> None:
    reader = HarmonyReader()
    reader.prime(prompt)
    got = read(reader, list(text))
    assert (got.content, got.reasoning) == found


class Letters:
    """A tokenizer whose tokens are the code points of a text, and one token for </think>."""

    END = 0

    def token_id(self, text: str) -> int | None:
        return self.END if text == "</think>" else ord(text) if len(text) == 1 else None

    def token_text(self, token: int) -> str:
        return "</think>" if token == self.END else chr(token)


@given(st.lists(st.integers(0, 30), max_size=4))
def test_tokens_of_reasoning_are_counted(steps: list[int]) -> None:
    tokens = [*map(ord, "a thought"), Letters.END, *map(ord, "an answer")]
    count = ReasoningCount(ThinkReader(THINK, Begin.REASONING), Letters(), THINK)  # type: ignore[arg-type]
    for end in sorted(steps):
        assert count.update(tokens[:end]) == min(9, end)
    assert count.update(tokens) == 9


class Words:
    """A tokenizer whose tokens are these."""

    WORDS = ("<|channel>", "<channel|>", "thought", "\n", "I", "Yes")

    def token_id(self, text: str) -> int | None:
        return self.WORDS.index(text) if text in self.WORDS else None

    def token_text(self, token: int) -> str:
        return self.WORDS[token]


def test_marks_and_labels_are_not_counted() -> None:
    """Reasoning of Gemma 4, which comes twice."""
    count = ReasoningCount(ThinkReader(GEMMA, Begin.EITHER), Words(), GEMMA)  # type: ignore[arg-type]
    tokens = [0, 2, 3, 4, 4, 1, 5, 0, 2, 3, 4, 1, 5]
    assert [count.update(tokens[:end]) for end in range(1, 14)] == [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("begin", ["call:", ":"])
def test_calls_end_the_reasoning_of_gemma(begin: str) -> None:
    text = f"<|channel>thought\nHm.<|tool_call>{begin}walk{{}}<tool_call|>"
    reader = ThinkReader(GEMMA, Begin.EITHER, Gemma4Calls(), ends_at_calls=True)
    found = read(reader, list(text))
    assert (found.reasoning, found.content) == ("Hm.", "")
    assert [call["function"]["name"] for call in found.calls] == ["walk"]


class Digits:
    """A matcher that allows token 1 alone."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.taken += tokens
        return True

    def compute_bitmask(self) -> bytes:
        return np.array([2, 0], dtype=np.uint32).tobytes()


def allowed(matcher: GatedMatcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_grammar_begins_where_reasoning_ends() -> None:
    matcher = Digits()
    reader = ThinkReader(THINK, Begin.REASONING)
    gated = GatedMatcher(matcher, ReasoningGate(reader, Letters().token_text), 40, [39])  # type: ignore[arg-type]
    assert allowed(gated) == set(range(39))  # without the end of the text
    assert gated.consume_tokens([33, 34])
    assert allowed(gated) == set(range(39))
    assert gated.consume_tokens([Letters.END, 1])
    assert allowed(gated) == {1}
    assert matcher.taken == [1]


def test_reasoning_may_be_left_out_where_the_model_chooses() -> None:
    form = ReasoningFormat("(", ")", Begin.EITHER)
    for first, mask in ((ord("("), set(range(64))), (1, {1})):
        matcher = Digits()
        gate = ReasoningGate(ThinkReader(form, Begin.EITHER), Letters().token_text, may_begin=ord("("), may_end=True)
        gated = GatedMatcher(matcher, gate, 64, [])  # type: ignore[arg-type]
        assert allowed(gated) == {1, ord("(")}
        assert gated.consume_tokens([first])
        assert allowed(gated) == mask
        assert gated.consume_tokens([ord(")"), 1] if first != 1 else [1])
        assert allowed(gated) == {1}
        assert matcher.taken == [1, 1][: 1 + (first == 1)]


def special_tokenizer(folder: Path, *marks: str) -> Tokenizer:
    description = json.loads((SHIPPED / "stories260k" / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    size = len(description["model"]["vocab"])
    for index, mark in enumerate(marks):
        description["added_tokens"].append({"id": size + index, "content": mark, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return Tokenizer(folder)


def answer_shape(parsers: AnswerParsers, request: ChatRequest) -> AnswerShape:
    """The parsers for one request."""
    return AnswerShape.read(parsers, request.functions, template_variables(request, parsers.tokenizer))


def test_marks_that_are_special_tokens_are_shown(tmp_path: Path) -> None:
    tokenizer = special_tokenizer(tmp_path, "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[INST]")
    parsers = AnswerParsers(tokenizer, "mistral", "mistral")
    text = "[THINK]Hm[/THINK][TOOL_CALLS]walk{}[INST]"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for tools, said in ((TOOLS, "[THINK]Hm[/THINK][TOOL_CALLS]walk{}"), (None, "[THINK]Hm[/THINK]walk{}")):
        shape = answer_shape(parsers, ChatRequest(messages=CHAT, tools=tools))
        shown = tokenizer.detokenizer([], shown=shape.shown).add(tokens)
        assert shown.replace(" ", "") == said  # this tokenizer puts a space before every part


def test_a_vocabulary_with_channels_is_read_as_such(tmp_path: Path) -> None:
    parsers = AnswerParsers(special_tokenizer(tmp_path, *MARKS))
    shape = answer_shape(parsers, ChatRequest(messages=CHAT, tools=TOOLS))
    assert len(shape.shown) == len(MARKS)
    assert [parsers.tokenizer.token_text(token) for token in shape.stop_tokens] == ["<|return|>", "<|call|>"]
    got = read(shape.reader("<|start|>assistant"), [harmony(ANALYSIS, harmony_call("walk", "{}"))])
    assert summary(got) == ("", [("walk", "{}")], "The user wants paint.")
    forced = answer_shape(parsers, ChatRequest(messages=CHAT, tools=TOOLS, tool_choice="required"))
    text = harmony(ANALYSIS, '<|channel|>final<|message|>[{"name": "walk", "parameters": {}}]')
    assert summary(read(forced.reader("<|start|>assistant"), [text])) == (
        "",
        [("walk", "{}")],
        "The user wants paint.",
    )
    gate = forced.gate("<|start|>assistant")
    assert gate is not None
    assert not gate.open
    plain = answer_shape(AnswerParsers(Tokenizer(SHIPPED / "stories260k")), ChatRequest(messages=CHAT))
    assert plain.parsers.reasoning is None
    assert plain.stop_tokens == []


def test_options() -> None:
    assert read_options({"reasoning_parser": "gpt-oss"}).reasoning_parser == "openai_gptoss"
    assert read_options({"reasoning_parser": "deepseek-r1"}).reasoning_parser == "deepseek_r1"
    with pytest.raises(InputError, match="reasoning_parser: 'thinker' is none of deepseek_r1, deepseek_v3"):
        read_options({"reasoning_parser": "thinker"})
    for pair in (("openai", "qwen3"), ("hermes", "openai_gptoss")):
        with pytest.raises(InputError, match="exclude each other"):
            read_options({"tool_call_parser": pair[0], "reasoning_parser": pair[1]})


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(reasoning_parser="deepseek_r1", tool_call_parser="hermes") as live:
        yield live


@pytest.fixture
def forced(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """A server whose forms hold for the reasoning as well: they stand in for a model that was trained to reason."""
    monkeypatch.setattr(AnswerShape, "gate", lambda *_: None)
    return server


def deltas(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    response = server.post("/v1/chat/completions", **body, stream=True, stream_options={"include_usage": True})
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def joined(chunks: list[dict[str, Any]], name: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(name) or "" for chunk in chunks if chunk["choices"])


def test_reasoning_over_http(forced: LiveServer) -> None:
    body = {"messages": CHAT, "max_tokens": 200, "temperature": 0, "guided_regex": "She left\\.</think>\n\nFar away\\."}
    answer = forced.post("/v1/chat/completions", **body).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == "\n\nFar away."
    assert message["reasoning_content"] == message["reasoning"] == "She left."
    usage = answer["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    chunks = deltas(forced, **body)
    assert joined(chunks, "content") == "\n\nFar away."
    assert joined(chunks, "reasoning_content") == joined(chunks, "reasoning") == "She left."
    assert chunks[-1]["usage"] == usage

    hidden = forced.post("/v1/chat/completions", **body, include_reasoning=False).json()
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": "\n\nFar away."}
    assert hidden["usage"] == usage
    chunks = deltas(forced, **body, include_reasoning=False)
    assert joined(chunks, "reasoning_content") == ""
    assert joined(chunks, "content") == "\n\nFar away."


def test_reasoning_and_a_call_over_http(forced: LiveServer) -> None:
    form = r"Go\.</think><tool_call>\{\"name\": \"walk\", \"arguments\": \{\}\}</tool_call>"
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 200, "temperature": 0, "guided_regex": form}
    choice = forced.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Go.", None)
    assert message["tool_calls"][0]["function"] == {"name": "walk", "arguments": "{}"}
    chunks = deltas(forced, **body)
    (call,) = [call for chunk in chunks[:-1] for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert call["function"] == {"name": "walk", "arguments": "{}"}


def test_an_answer_that_is_all_reasoning(server: LiveServer) -> None:
    answer = server.post("/v1/chat/completions", messages=CHAT, max_tokens=5, temperature=0).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server for which the first sentence is reasoning."""
    monkeypatch.setattr(reasoning, "FORMATS", {"sentence": ReasoningFormat(end=".")})
    with live_server(reasoning_parser="sentence") as live:
        yield live


def test_a_form_holds_after_the_reasoning(sentences: LiveServer) -> None:
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    body = {"messages": CHAT, "max_tokens": 250, "temperature": 0}
    plain = sentences.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    answer = sentences.post("/v1/chat/completions", **body, guided_json={**schema, "additionalProperties": False})
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning"] == plain["reasoning"]  # the form changes nothing before
    assert json.loads(message["content"])["colour"] in ("red", "blue")
    chunks = deltas(sentences, **body, guided_json={**schema, "additionalProperties": False})
    assert joined(chunks, "content") == message["content"]

    named = {"type": "function", "function": {"name": "walk"}}
    tools = [{"type": "function", "function": {"name": "walk"}}]
    choice = sentences.post("/v1/chat/completions", **body, tools=tools, tool_choice=named).json()["choices"][0]
    assert choice["message"]["reasoning"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "walk"


def test_reasoning_of_earlier_messages_reaches_the_template(server: LiveServer) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.thinking }}]{{ reasoning_effort }}{% endfor %}"
    tokenizer = server.front.tokenizer
    kept = tokenizer.chat_template
    tokenizer.use_chat_template(template)
    try:
        messages = [{"role": "assistant", "content": None, "reasoning": "Hm"}]
        tokens = server.post("/tokenize", messages=messages, reasoning_effort="low").json()["tokens"]
        assert tokenizer.decode(tokens) == "[Hm|Hm]low"
    finally:
        tokenizer.chat_template = kept
