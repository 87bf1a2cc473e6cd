"""Chat templates with the constructs of published ones, tests/data/chat_templates, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from template_families import families

from kvanta import InputError
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.text.chat_messages import plain_messages
from kvanta.text.chat_template import ChatTemplate
from kvanta.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

_FILES = sorted((Path(__file__).resolve().parents[1] / "data" / "chat_templates").glob("*.jinja"))
CORPUS = {file.stem: file.read_text(encoding="utf-8") for file in _FILES} | families()
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
USER: dict[str, Any] = {"role": "user", "content": " What is the weather in Zürich? \n"}
THINKS: dict[str, Any] = {"role": "assistant", "content": "<think>\nA city.\n</think>\n\nIt rains.\n"}
FUNCTION = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
CALLS = [{"id": each, "type": "function", "function": FUNCTION} for each in ("a1b2c3d4e", "b1b2c3d4e")]
CALL: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}
RESULT: dict[str, Any] = {"role": "tool", "name": "weather", "tool_call_id": "a1b2c3d4e", "content": '{"rain": true}'}
PARTS = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}
DOCUMENTS = [{"id": 1, "title": "Rain", "text": "It\nrains."}, {"title": "Sun", "year": 2026}]
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
SYSTEM_PARTS = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
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
    "reasoning in a field": (
        [USER, {**THINKS, "content": "It rains.", "reasoning_content": "A city."}, USER, CALL, RESULT],
        {"tools": TOOLS},
    ),
    "calls without functions": ([USER, CALL, RESULT, THINKS, USER], {}),
    "two calls": (
        [
            USER,
            {**CALL, "tool_calls": CALLS},
            RESULT,
            {**RESULT, "tool_call_id": "b1b2c3d4e"},
        ],
        {"tools": TOOLS},
    ),
    "all contents in parts": ([SYSTEM_PARTS, PARTS, {**PARTS, "role": "assistant"}, PARTS], {}),
    "many turns": ([SYSTEM, *[USER, CALL, RESULT, THINKS] * 6, USER], {"tools": TOOLS}),
}


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers.AutoTokenizer.from_pretrained(SHIPPED / "stories260k")


def of_transformers(oracle: Any, source: str, chat: str) -> tuple[str, str]:
    """The text, or the reason why there is none."""
    messages, names = CHATS[chat]
    given = {"add_generation_prompt": True, **names}
    try:
        return oracle.apply_chat_template(messages, chat_template=source, tokenize=False, **given), ""
    except (jinja2.TemplateError, TypeError) as error:
        return "", str(error)


def arguments_of(chat: str) -> dict[str, Any]:
    """Arguments of render and of apply_chat_template."""
    names = CHATS[chat][1]
    own = {name: value for name, value in names.items() if name in ("add_generation_prompt", "tools")}
    return {**own, "variables": {name: value for name, value in names.items() if name not in own}}


@pytest.mark.parametrize("name", CORPUS)
def test_the_text_is_that_of_transformers(oracle: Any, name: str) -> None:
    template = ChatTemplate(CORPUS[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for chat, (messages, _) in CHATS.items():
        expected, reason = of_transformers(oracle, CORPUS[name], chat)
        if reason:
            with pytest.raises(InputError, match=re.escape(f"chat template refuses these messages: {reason}")):
                template.render(messages, **arguments_of(chat))
        else:
            assert template.render(messages, **arguments_of(chat)) == expected, chat


@pytest.mark.parametrize("name", CORPUS)
def test_a_conversation_is_not_adapted_where_the_template_takes_it(oracle: Any, name: str) -> None:
    """As a request's messages go: contents in parts become texts only where the list itself would be written."""
    tokenizer = Tokenizer(SHIPPED / "stories260k")
    same = 0
    for chat, (messages, _) in CHATS.items():
        expected, reason = of_transformers(oracle, CORPUS[name], chat)
        listed = any(isinstance(each["content"], list) for each in messages) and "type" in expected
        if not reason and not listed and all(_shown(each, expected) for each in messages):
            given = arguments_of(chat)
            text = tokenizer.apply_chat_template(plain_messages(messages), chat_template=CORPUS[name], **given)
            assert text == expected, chat
            same += 1
    assert same >= 5


def _shown(message: dict[str, Any], text: str) -> bool:
    """A template that leaves a message out gets another form of it."""
    content = message["content"]
    texts = [part["text"] for part in content] if isinstance(content, list) else [content.split("</think>")[-1]]
    return all(each.strip() in text for each in texts)


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
    template = ChatTemplate(CORPUS[name], {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(long_chat(2000)).count("word") == 200_000
    few = long_chat(40)
    expected = oracle.apply_chat_template(few, chat_template=CORPUS[name], tokenize=False, add_generation_prompt=True)
    assert template.render(few) == expected


@pytest.mark.parametrize("name", CORPUS)
def test_most_chats_have_texts_of_their_own(oracle: Any, name: str) -> None:
    """Else the tests above would compare refusals."""
    assert len({of_transformers(oracle, CORPUS[name], chat)[0] for chat in CHATS} - {""}) >= 3
