"""Chats in the form that templates take: nothing is lost or refused, whatever roles, calls and functions they have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvanta.checkpoint.resolve import SHIPPED
from kvanta.parsers import written_calls
from kvanta.parsers.tool_calls import PARSERS, rest_of
from kvanta.text.chat_messages import plain_messages
from kvanta.text.tokenizer import Tokenizer

CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
# Templates by what they do with a message that they do not know.
VERBATIM = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
DROPS = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}[{{ m.role }}]{{ m.content }}"
    f"{CALLS}{{% endif %}}{{% endfor %}}"
)
RAISES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}{% endif %}"
    "{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('role') }}{% endif %}"
    f"[{{{{ m.role }}}}]{{{{ m.content }}}}{CALLS}{{% endfor %}}"
)
FIRST_ALONE = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NAMES_DEVELOPER = "{% for m in messages %}[{{ m.role if m.role != 'developer' else 'dev' }}]{{ m.content }}{% endfor %}"
ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}{# 'tool' #}"
)
U, V, S, T, D = (
    {"role": role, "content": text}
    for role, text in (("user", "one"), ("user", "two"), ("system", "be"), ("system", "brief"), ("developer", "now"))
)
A = {"role": "assistant", "content": "hm"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(arguments: Any) -> list[dict[str, Any]]:
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return [
        U,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
        V,
    ]


def render(template: str, messages: Sequence[dict[str, Any]], tools: Any = None, parser: str = "hermes") -> str:
    tokenizer = Tokenizer(SHIPPED / "stories260k")
    tokenizer.use_chat_template(template)
    tokenizer.tool_syntax = written_calls.SYNTAXES[parser]
    before = json.dumps(messages)
    text = tokenizer.apply_chat_template(plain_messages(messages), tools=tools, add_generation_prompt=False)
    assert json.dumps(messages) == before
    return text


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (VERBATIM, [S, U], "[system]be[user]one"),
        (VERBATIM, [D, U], "[system]now[user]one"),
        (VERBATIM, [S, U, A, T, V], "[system]be[user]one[assistant]hm[system]brief[user]two"),
        (VERBATIM, [U, V], "[user]one[user]two"),
        (DROPS, [D, U], "[system]now[user]one"),
        (DROPS, [S, D, U, T], "[system]be[system]now[user]one[system]brief"),
        (RAISES, [D, U], "[system]now[user]one"),
        (RAISES, [S, D, U, A, T, V], "[system]be\n\nnow\n\nbrief[user]one[assistant]hm[user]two"),
        (RAISES, [U, T, V], "[system]brief[user]one[user]two"),
        (FIRST_ALONE, [S, U, A, T, D, V], "[system]be\n\nbrief\n\nnow[user]one[assistant]hm[user]two"),
        (ALTERNATES, [S, U, A, T, V], "[user]be\n\nbrief\n\none[assistant]hm[user]two"),
        (ALTERNATES, [S], "[user]be"),
        (ALTERNATES, [U, T, V, A, V, D], "[user]brief\n\nnow\n\none\n\ntwo[assistant]hm[user]two"),
        (NAMES_DEVELOPER, [S, D, U], "[system]be[dev]now[user]one"),
    ],
)
def test_instructions_are_never_lost(template: str, messages: list[dict[str, Any]], text: str) -> None:
    assert render(template, messages) == text


@pytest.mark.parametrize("template", [DROPS, RAISES, "turns.jinja"])
def test_every_instruction_is_shown(template: str) -> None:
    if template.endswith(".jinja"):
        template = (Path(__file__).resolve().parents[1] / "data" / "chat_templates" / template).read_text()
    for chat in ([D, U], [S, U, A, D, V], [S, T, U]):
        rendered = render(template, chat)
        assert all(message["content"] in rendered for message in chat), rendered


@pytest.mark.parametrize(
    ("arguments", "as_text", "as_object"),
    [
        ('{"city": "Rome"}', '{"city": "Rome"}', "city=Rome"),
        ('{"city": ', r'"{\"city\": "', ""),
        ("[1]", '"[1]"', ""),
        ("null", "{}", ""),
        ("", "{}", ""),
        (None, "{}", ""),
        (5, '"5"', ""),
    ],
)
def test_arguments_that_are_no_json(arguments: Any, as_text: str, as_object: str) -> None:
    chat = call(arguments)
    written = f'<call>{{"name": "weather", "arguments": {as_text}}}</call>'
    assert render(RAISES, chat) == f"[user]one[assistant]{written}[tool]rain[user]two"
    assert render(ITEMS, chat) == f"[user]one[assistant]weather({as_object})[tool]rain[user]two"
    assert str(arguments or "{}") in render(VERBATIM, chat) or arguments == "null"


@pytest.mark.parametrize("parser", PARSERS)
def test_functions_for_templates_that_do_not_show_them(parser: str) -> None:
    """In the syntax of the parser, which reads them as they were."""
    rendered = render(VERBATIM, [S, *call('{"city": "Rome"}')], TOOLS, parser)
    assert rendered.startswith("[system]# Tools")
    assert rendered.index('{"name": "weather", "parameters": {"type": "object"}}') < rendered.index("be[user]one")
    assert rendered.endswith("[user]<tool_response>\nrain\n</tool_response>[user]two")
    written = rendered.split("[assistant]")[1].split("[user]")[0]
    example = rendered.split("like this:\n")[1].split("\n\n")[0]
    for text, name, arguments in ((written, "weather", {"city": "Rome"}), (example, "NAME", {"ARGUMENT": "VALUE"})):
        (found,) = rest_of(PARSERS[parser](), text).calls
        assert (found["function"]["name"], json.loads(found["function"]["arguments"])) == (name, arguments)


def test_two_calls_of_a_message_are_read_again() -> None:
    for parser in PARSERS:
        text = written_calls.SYNTAXES[parser].calls([("walk", {"to": 1}), ("run", {})])
        names = [call["function"]["name"] for call in rest_of(PARSERS[parser](), text).calls]
        assert names == ["walk", "run"], parser


def test_templates_that_show_functions_get_them() -> None:
    template = "{{ tools | tojson }}" + RAISES
    assert render(template, [U], TOOLS) == json.dumps(TOOLS) + "[user]one"
    tokenizer = Tokenizer(SHIPPED / "stories260k")
    tokenizer.tool_syntax = written_calls.DEFAULT
    for source, writes in ((template, False), (RAISES, True)):
        tokenizer.use_chat_template(source)
        assert tokenizer.writes_tools(TOOLS) is writes
        assert not tokenizer.writes_tools(None)


def test_a_message_that_is_continued_stays_the_last() -> None:
    tokenizer = Tokenizer(SHIPPED / "stories260k")
    tokenizer.use_chat_template(RAISES)
    chat = plain_messages([U, T, {"role": "assistant", "content": "Well,"}])
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == "[system]brief[user]one[assistant]Well,"


PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% elif m.role == 'tool' %}"
    "{{ m.content | tojson }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
)


def test_contents_in_parts_stay_parts_where_the_template_takes_them() -> None:
    """As vLLM gives them (its content format `openai`): without line breaks of our own between the parts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat = plain_messages(
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": parts, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": parts},
            {"role": "assistant", "content": parts},
        ]
    )
    tokenizer = Tokenizer(SHIPPED / "stories260k")
    given: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = tokenizer.apply_chat_template(chat, chat_template=PARTS_TEMPLATE, **given)
    assert text == "user:ab;assistant:ab;tool:a\nb;assistant:ab"
    text = tokenizer.apply_chat_template(chat, chat_template="{{ messages[0].content }}")
    assert text == "a\nb"
