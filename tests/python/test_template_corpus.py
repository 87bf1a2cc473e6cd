"""Chat templates with the constructs of published ones, tests/data/chat_templates, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from kvanta import InputError
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.text.chat_template import ChatTemplate

transformers = pytest.importorskip("transformers")

CORPUS = sorted((Path(__file__).resolve().parents[1] / "data" / "chat_templates").glob("*.jinja"))
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'A "city" <name>'},
        "unit": {"type": "string", "enum": ["°C", "°F"]},
        "days": {"type": ["integer", "null"]},
        "at": {"type": "object", "properties": {"hours": {"type": "array", "items": {"type": "number"}}}},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
USER = {"role": "user", "content": " What is the weather in Zürich? \n"}
THINKS = {"role": "assistant", "content": "<think>\nA city.\n</think>\n\nIt rains.\n"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "a1b2c3d4e",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e", "content": '{"rain": true}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}
DOCUMENTS = [{"id": 1, "title": "Rain", "text": "It\nrains."}, {"title": "Sun", "year": 2026}]
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([USER], {}),
    "a system's text": ([{"role": "system", "content": " Be brief. "}, USER, THINKS, USER], {}),
    "tools": ([{"role": "system", "content": "Be brief."}, USER], {"tools": TOOLS}),
    "a call and its result": ([USER, CALL, RESULT], {"tools": TOOLS}),
    "a call, two results and an answer": ([USER, CALL, RESULT, RESULT, THINKS, USER], {"tools": TOOLS}),
    "contents in parts": ([PARTS], {}),
    "documents": ([USER, THINKS, USER], {"documents": DOCUMENTS}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "further names": (
        [USER],
        {"date_string": "2 Feb 2026", "reasoning_effort": "high", "custom_tools": TOOLS},
    ),
    "turns out of order": ([USER, USER], {}),
    "no generation": ([USER, THINKS], {"add_generation_prompt": False}),
}


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers.AutoTokenizer.from_pretrained(SHIPPED / "stories260k")


def of_transformers(oracle: Any, file: Path, chat: str) -> tuple[str, str]:
    """The text, or the reason why there is none."""
    messages, names = CHATS[chat]
    given = {"add_generation_prompt": True, **names}
    source = file.read_text(encoding="utf-8")
    try:
        return oracle.apply_chat_template(messages, chat_template=source, tokenize=False, **given), ""
    except (jinja2.TemplateError, TypeError) as error:
        return "", str(error)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_the_text_is_that_of_transformers(oracle: Any, file: Path, chat: str) -> None:
    messages, names = CHATS[chat]
    own = {name: value for name, value in names.items() if name in ("add_generation_prompt", "tools")}
    variables = {name: value for name, value in names.items() if name not in own}
    template = ChatTemplate(file.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
    expected, reason = of_transformers(oracle, file, chat)
    if reason:
        with pytest.raises(InputError, match=re.escape(f"chat template refuses these messages: {reason}")):
            template.render(messages, variables=variables, **own)
    else:
        assert template.render(messages, variables=variables, **own) == expected


def long_chat(messages: int) -> list[dict[str, Any]]:
    """Questions, two calls, a result of the first, an answer."""
    chat: list[dict[str, Any]] = []
    for turn in range(messages // 4):
        calls = [
            {"id": f"{turn}-{call}", "type": "function", "function": {"name": f"f{turn % 7}", "arguments": {"a": turn}}}
            for call in range(2)
        ]
        chat += [
            {"role": "user", "content": f"What about {turn}?"},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "word " * 400},
            {"role": "assistant", "content": "It is so."},
        ]
    return chat


@pytest.mark.parametrize("name", ["command_r7b", "deepseek_v32", "gemma4", "gpt_oss", "reka_edge"])
def test_long_chats_are_within_the_limits(oracle: Any, name: str) -> None:
    """2,000 messages with 1,000 calls, by templates that look at all of them for each of them."""
    source = (CORPUS[0].parent / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(long_chat(2000)).count("word") == 200_000
    few = long_chat(40)
    expected = oracle.apply_chat_template(few, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert template.render(few) == expected


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_most_chats_have_texts_of_their_own(oracle: Any, file: Path) -> None:
    """Else the test above would compare refusals."""
    assert len({of_transformers(oracle, file, chat)[0] for chat in CHATS} - {""}) >= 6
