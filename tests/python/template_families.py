"""Chat templates put together from the pieces of tests/data/chat_templates/families.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_TABLE = Path(__file__).resolve().parents[1] / "data" / "chat_templates" / "families.toml"

_CONTENT = {
    "string": "{% set content = message['content'] or '' %}",
    "parts": "{% if message['content'] is string %}{% set content = message['content'] %}{% else %}"
    "{% set parts = namespace(text='') %}{% for part in message['content'] or [] %}{% if part['type'] == 'text' %}"
    "{% set parts.text = parts.text + part['text'] %}{% elif part['type'] == 'image' %}"
    "{% set parts.text = parts.text + '<image>' %}{% else %}{{ raise_exception('no such part') }}{% endif %}"
    "{% endfor %}{% set content = parts.text %}{% endif %}",
    "macro": "{% set content = text_of(message.content) %}",
}
_TEXT_OF = (
    "{% macro text_of(content) -%}{%- if content is string -%}{{- content }}"
    "{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}"
    "{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}"
    "{%- endif -%}{%- endfor -%}{%- elif content is none or content is undefined -%}"
    "{%- else -%}{{- content }}{%- endif -%}{%- endmacro %}"
)
_RULES = {
    "alternate": "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}",
    "alternate_without_tools": "{% set turn = namespace(index=0) %}{% for message in messages %}"
    "{% if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}"
    "{% if (message['role'] == 'user') != (turn.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set turn.index = turn.index + 1 %}{% endif %}{% endfor %}",
    "no_late_system": "{% for message in messages if message.role == 'system' %}"
    "{{ raise_exception('the system message must be first') }}{% endfor %}",
    "last_user": "{% set ns = namespace(last_user=messages | length - 1, found=false, last_call=none) %}"
    "{% for message in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}"
    "{% if not ns.found and message.role == 'user' and not (message.content is string and "
    "message.content.startswith('<tool_response>')) %}{% set ns.found = true %}{% set ns.last_user = index %}"
    "{% endif %}{% endfor %}{% if not ns.found %}{{ raise_exception('no question') }}{% endif %}",
    "last_call": "{% if ns is not defined %}{% set ns = namespace(last_call=none) %}{% endif %}",
}
_CUT = (
    "{% if '</think>' in content %}{% set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]"
    ".lstrip('\\n') %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_LAST_QUESTION = (
    "{% set questions = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set questions.last = loop.index0 %}{% endif %}{% endfor %}"
)
_THINKING = {
    "": "",
    "drop": "{% if message.role == 'assistant' %}" + _CUT + "{% set reasoning = '' %}{% endif %}",
    "field": "{% if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}{% endif %}",
    "last": "{% if message.role == 'assistant' %}{% if message.reasoning_content is string %}"
    "{% set reasoning = message.reasoning_content %}{% else %}" + _CUT + "{% endif %}"
    "{% if loop.index0 <= questions.last %}{% set reasoning = '' %}{% endif %}{% endif %}",
}


def families() -> dict[str, str]:
    """The source of each family's template."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return {name: _source(_inherited(table, row)) for name, row in table.items()}


def _inherited(table: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    if "base" not in row:
        return row
    base = _inherited(table, table[row["base"]])
    return {**base, **row, "turns": {**base["turns"], **row.get("turns", {})}}


def _source(row: dict[str, Any]) -> str:
    system = row.get("system", "role")
    tools = "{% if tools %}" + row.get("tools", "") + "{% endif %}"
    parts = [row.get("macros", ""), _TEXT_OF if row.get("content") == "macro" else "", row.get("start", "")]
    parts.append(tools if row.get("tools_at") == "start" else "")
    if system == "none":
        parts.append(
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}",
        )
    elif system != "role":
        parts += [
            "{% if messages[0]['role'] == 'system' %}",
            "{% set system = messages[0]['content'] if messages[0]['content'] is string ",
            "else messages[0]['content'] | map(attribute='text') | join %}{% set messages = messages[1:] %}",
            "{% else %}{% set system = default_system if default_system is defined else ",
            repr(row.get("default", "")),
            " %}{% endif %}",
        ]
        if system not in ("first", "last"):
            parts.append("{% if system %}" + system + "{% endif %}")
    parts.append(tools if row.get("tools_at") == "system" else "")
    parts += [_RULES[rule] for rule in row.get("rules", ())]
    parts.append(_LAST_QUESTION if row.get("thinking") == "last" else "")
    parts += ["{% for message in messages %}", _CONTENT[row.get("content", "string")], "{% set reasoning = '' %}"]
    parts.append(_THINKING[row.get("thinking", "")])
    parts.append("{% set calls = message.tool_calls or [] %}{% set written = '' %}")
    if "calls" in row:
        parts += [
            "{% set written %}{% for call in calls %}{% set name = call.function.name %}",
            "{% set arguments = call.function.arguments %}",
            row["calls"],
            "{{ " + repr(row.get("between", "")) + " if not loop.last }}{% endfor %}{% endset %}",
        ]
    if system in ("first", "last") or row.get("tools_at") in ("first", "last"):
        written = row.get("first", "{{ system }}\n\n") if system in ("first", "last") else ""
        for place in ("first", "last"):
            here = tools if row.get("tools_at") == place else ""
            here += "{% if system %}" + written + "{% endif %}" if system == place else ""
            if here:
                test = (
                    "loop.first"
                    if place == "first"
                    else "message == (messages | selectattr('role', 'equalto', 'user') | list)[-1]"
                )
                parts.append(
                    "{% if " + test + " and message.role == 'user' %}{% set before %}" + here + "{% endset %}"
                    "{% set content = before ~ content %}{% endif %}"
                )
    turns = row["turns"]
    for index, (role, turn) in enumerate(sorted(turns.items(), key=lambda entry: entry[0] == "any")):
        if role == "any":
            parts.append("{% else %}" + turn + "{% endif %}" if index else turn)
        else:
            parts.append(("{% elif " if index else "{% if ") + f"message['role'] == {role!r} %}}" + turn)
    if "any" not in turns:
        parts.append("{% else %}{{ raise_exception('no such role: ' + message['role']) }}{% endif %}")
    parts.append("{% endfor %}")
    if "end" in row:
        parts.append("{% if add_generation_prompt %}" + row["end"])
        parts.append("{% else %}" + row["otherwise"] + "{% endif %}" if "otherwise" in row else "{% endif %}")
    return "".join(parts)
