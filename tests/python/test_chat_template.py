"""Chat templates: what published models write in theirs, and what hostile ones might."""

import datetime
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kvanta import InputError
from kvanta.checkpoint.resolve import SHIPPED
from kvanta.text import template_budget
from kvanta.text.chat_template import ChatTemplate
from kvanta.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: Any = HELLO, **named: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages, **named)


def test_chatml() -> None:
    assert render(CHATML) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(CHATML, [{"role": "system", "content": "S"}, *HELLO], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )


TEMPLATES = [
    CHATML,
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n    [INST] {{ m.content | trim }} [/INST]\n"
    "  {% else %}\n    {{ m.content }}{{ eos_token }}\n  {% endif %}\n{% endfor %}",
    "{%- for m in messages %}{%- if m.role == 'tool' %}{%- continue %}{%- endif %}{{ m.content }}{%- endfor %}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{{ messages | tojson }} {{ {'a': 'é<&'} | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
    "{% if loop.previtem is defined %}{{ loop.previtem.role }}{% endif %}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}{{ m.content }}{% else %}none{% endfor %}",
    "{% for k, v in {'a': [1, [2]]}.items() %}{{ k }}{% for x in v recursive %}"
    "{% if x is sequence %}<{{ loop(x) }}>{% else %}{{ x }}{% endif %}{% endfor %}{% endfor %}",
    "{% for x in no %}{{ x }}{% else %}none{% endfor %}",
    "{% macro show(x) %}<{{ x }}>{% endmacro %}{{ show(messages[-1]['content']) }}{{ messages[0].get('name', '-') }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_rendering_equals_transformers(source: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoTokenizer.from_pretrained(SHIPPED / "stories260k")
    messages = [*HELLO, {"role": "assistant", "content": " Hé \"<&>' 👩‍👧 "}, {"role": "user", "content": "Bye"}]
    expected = oracle.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    assert render(source, messages) == expected


def test_a_format_is_not_taken_for_the_other_kind() -> None:
    assert render('{{ \'{"id": "%s", "results": {"0": %s}}\' | format(\'a\', 1) }}') == (
        '{"id": "a", "results": {"0": 1}}'
    )
    assert render("{{ '{} %12345d'.format('a') }}") == "a %12345d"


def test_functions_that_templates_expect() -> None:
    year = str(datetime.datetime.now().year)
    assert render("{{ strftime_now('%Y') }}") == year
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    assert render("{{ x }}", variables={"x": "thinking"}) == "thinking"
    assert render("{{ tools | tojson }}", tools=[{"type": "function"}]) == '[{"type": "function"}]'
    assert json.loads(render("{{ messages | tojson }}")) == HELLO


DOUBLING = "{% set ns = namespace(s='x' * 9999, l=[1]) %}{% for i in range(60) %}"
HOARDING = (
    "{% set ns = namespace(l=[]) %}{% set s = 'x' * 99999 %}{% set r = range(99999) | list %}{% set d = dict(a=r) %}"
)
HOARDED = [
    *(
        "[1] | batch(9999, 0) | list",
        "r | batch(9) | list",
        "[1] | slice(9999, 0) | list",
        "r | reverse | list",
    ),
    *("s | reverse", "s | upper", "s | trim", "s.upper()", "s.strip('y')", "s.encode()", "s.partition('y')"),
    *("s[1:]", "r[:]", "r[::-1]", "r.copy()", "dict(d, b=r | list)", "[" + "1," * 9999 + "1]", "(s ~ i) | lower"),
]
HOSTILE_SIZES = [
    *(HOARDING + f"{{% for i in range(99999) %}}{{% set ns.l = [ns.l, {each}] %}}{{% endfor %}}" for each in HOARDED),
    "{{ 'a' * 3000000000 }}",
    "{{ 3000000000 * 'a' }}",
    "{{ [1] * 1000000000 }}",
    DOUBLING + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    DOUBLING + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
    DOUBLING + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    DOUBLING + "{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
    DOUBLING + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    DOUBLING + "{% set ns.s = '%s%s' | format(ns.s, ns.s) %}{% endfor %}",
    DOUBLING + "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s.replace('x', new) %}{% endfor %}",
    DOUBLING + "{% set ns.s = ns.s.replace('', 'xx') %}{% endfor %}",
    DOUBLING + "{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = s %}{% endfor %}",
    DOUBLING + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    DOUBLING + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    DOUBLING + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | string }}",
    "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "{% macro m() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{% set s = m() %}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 2000000000) }}",
    "{{ 'a' | center(2000000000) }}",
    "{{ 'a'.ljust(2000000000) }}",
    "{{ 'a'.zfill(2000000000) }}",
    "{{ '\\t'.expandtabs(2000000000) }}",
    "{{ 'a\\nb' | indent(2000000000) }}",
    "{{ 'a\\nb' | indent(width=2000000000) }}",
    "{{ [[1]] | tojson(indent=2000000000) }}",
    "{{ [1] | batch(2000000000, 0) | list }}",
    "{{ ('a' * 9999999).translate({97: 'b' * 999999}) }}",
    "{{ (('a' * 9999) * 6000).split('a') }}",
    "{{ 2 ** 9999999999 }}",
    "{{ (('a ' * 9999) * 3000) | title }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE_SIZES)
def test_a_template_cannot_take_all_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak of what Python allocates, while it is compiled and rendered: 10 bytes for a character of the limit, or less.

    The limit is a 32nd of the real one, and the test as much shorter.
    """
    monkeypatch.setattr(template_budget, "_MOST_CHARACTERS", template_budget._MOST_CHARACTERS // 32)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"^the model's chat template refuses these messages: it "):
            render(source, variables={"new": "xxxx"})
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()


def test_a_long_chat_is_within_the_budget() -> None:
    chat = [{"role": "user", "content": "word " * 400}] * 2000
    assert len(render(CHATML, chat)) > 4_000_000
    assert render("{{ messages | tojson(indent=2) | length }}", chat)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for o in messages %}{% endfor %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}{% set t = ns.l | tojson %}"
        "{{ m.content }}{% endfor %}",
    ],
    ids=["pairs", "copies"],
)
def test_the_budget_grows_with_the_chat(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published templates look at all messages for each message, or copy them."""
    monkeypatch.setattr(template_budget, "_MOST_STEPS", 1000)
    monkeypatch.setattr(template_budget, "_MOST_CHARACTERS", 10_000)
    assert render(source, [{"role": "user", "content": "word " * 20}] * 150).count("word") == 3000
    with pytest.raises(InputError, match=r"it takes more than \d+ steps"):
        render("{% for a in range(99) %}{% for b in range(99) %}{% endfor %}{% endfor %}")


def test_a_text_that_grows_takes_its_last_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt gathered in a namespace; texts that are kept besides count."""
    monkeypatch.setattr(template_budget, "_MOST_CHARACTERS_EVER", 1_000_000)
    chat = [{"role": "user", "content": "word " * 200}] * 300
    gather = "{% set ns = namespace(s='', l=[]) %}{% for m in messages %}{% set ns.s = ns.s + m.content ~ '\n' %}"
    assert render(gather + "{% endfor %}{{ ns.s | length }}", chat) == str(300 * 1001)
    with pytest.raises(InputError, match="it makes more than 1000000 characters"):
        render(gather + "{% set ns.l = ns.l + [ns.s] %}{% endfor %}", chat)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ undefined_name.field }}",
        "{% include 'x' %}",
        "{{ lipsum(100000) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
        "{% set s = 'x' * 99999 %}{% for i in s %}{% for j in s %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set r = range(99999) | list %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set s = 'x' * 9999 %}{% for i in s recursive %}{% if loop.depth < 9 %}{{ loop(s) }}{% endif %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_one_clear_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of the steps, in an eighth of the time."""
    monkeypatch.setattr(template_budget, "_MOST_STEPS", template_budget._MOST_STEPS // 8)
    with pytest.raises(InputError, match=r"^the model's chat template refuses these messages: [^\n]+$"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{% unknown %}",
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
        "{{ 1" + "-1" * 5000 + " }}",
        "{% for x in messages %}" * 100 + "{% endfor %}" * 100,
        "{% if a %}" * 120 + "{% endif %}" * 120,
    ],
    ids=lambda source: source[:12],
)
def test_a_template_that_cannot_be_read(source: str) -> None:
    with pytest.raises(InputError, match=r"^the model's chat template cannot be read: [^\n]+$"):
        ChatTemplate(source, {})


def test_a_template_has_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, each of them slow."""
    template = ChatTemplate("{% set s = 'a' * 99999 %}{% for i in range(9) %}{% set t = s.upper() %}{% endfor %}", {})
    assert template.render(HELLO) == ""
    monkeypatch.setattr(template_budget, "_MOST_SECONDS_EVER", 0.0)
    monkeypatch.setattr(template_budget, "_MOST_SECONDS", 0.0)
    with pytest.raises(InputError, match="it takes more than 0 seconds"):
        template.render(HELLO)


def test_every_rendering_has_its_own_steps() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}", {})
    assert [template.render(HELLO) for _ in range(8)] == ["Hello"] * 8


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one"),
        ("hello", "list"),
        ({"role": "user", "content": "x"}, "list"),
        (["hello"], "message 0"),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], "content"),
    ],
)
def test_bad_messages(messages: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        render(CHATML, messages)


def model_folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    source = SHIPPED / "stories260k"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    merged = {**json.loads((source / "tokenizer_config.json").read_text()), **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(merged))
    return tmp_path


def test_where_a_template_may_stand(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, {"chat_template": "config {{ bos_token }}"})
    assert Tokenizer(folder).apply_chat_template(HELLO) == "config <s>"
    model_folder(
        tmp_path, {"chat_template": [{"name": "default", "template": "named"}, {"name": "rag", "template": ""}]}
    )
    assert Tokenizer(folder).apply_chat_template(HELLO) == "named"
    model_folder(tmp_path, {})
    assert Tokenizer(folder).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer(folder).apply_chat_template(HELLO) == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert Tokenizer(folder).apply_chat_template(HELLO) == "jinja"


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_chats_with_tools_take_the_template_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    folder = model_folder(tmp_path, {"chat_template": named})
    assert Tokenizer(folder).apply_chat_template(HELLO) == "plain"
    assert Tokenizer(folder).apply_chat_template(HELLO, tools=TOOLS) == "f"
    assert Tokenizer(folder).apply_chat_template(HELLO, tools=TOOLS, chat_template="own") == "own"
    replaced = Tokenizer(folder)
    replaced.use_chat_template("file")
    assert replaced.apply_chat_template(HELLO, tools=TOOLS) == "file"
    (folder / "chat_template.jinja").write_text("jinja")  # files come before tokenizer_config.json
    assert Tokenizer(folder).apply_chat_template(HELLO, tools=TOOLS) == "jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("jinja with tools")
    assert Tokenizer(folder).apply_chat_template(HELLO, tools=TOOLS) == "jinja with tools"
    assert Tokenizer(folder).apply_chat_template(HELLO) == "jinja"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(InputError, match="no chat template"):
        Tokenizer(SHIPPED / "stories260k").apply_chat_template(HELLO)


def test_a_template_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a text"):
        Tokenizer(model_folder(tmp_path, {"chat_template": 5}))


def test_the_last_message_can_be_continued() -> None:
    chat = [*HELLO, {"role": "assistant", "content": "Well, "}]
    named: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, chat, **named).endswith("<|im_start|>assistant\nWell, ")
    trims = CHATML.replace("message['content']", "message['content'] | trim")
    assert render(trims, chat, **named).endswith("<|im_start|>assistant\nWell,")
    assert render(CHATML, [*HELLO, {"role": "assistant", "content": ""}], **named).endswith("assistant\n")
    assert chat[-1]["content"] == "Well, "  # the caller's own
    with pytest.raises(InputError, match="exclude each other"):
        render(CHATML, chat, continue_final_message=True)
    with pytest.raises(InputError, match="does not show the last message"):
        render("{{ messages[0]['content'] }}", chat, **named)
    with pytest.raises(InputError, match="content is a text"):
        render(CHATML, [{"role": "assistant", "content": None, "tool_calls": []}], **named)
