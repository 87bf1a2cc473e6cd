#!/usr/bin/env python3
"""Fills the reference parts of docs/reference.md and docs/python.md from the declarations in python/kvanta.

    tools/reference.py [--check]

A block  <!-- reference:NAME -->...<!-- /reference -->  is replaced by what BLOCKS[NAME] makes of the parsers of the
commands, the options' dataclasses, the classes of parameters and those of results. --check changes nothing and fails
if a block is out of date.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvanta
from kvanta import outputs
from kvanta.cli import COMMANDS
from kvanta.cli.arguments import CommandParser
from kvanta.cli.bench import SUBJECTS
from kvanta.options import engine as engine_options
from kvanta.options import model as model_options
from kvanta.options.option import GROUPS
from kvanta.params.sampling_params import flag_fields

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/reference.md", "docs/python.md")
_BLOCK = re.compile(r"(<!-- reference:([a-z-]+) -->\n).*?(<!-- /reference -->)", re.DOTALL)
_OPTIONS = {option.name: option for option in (*engine_options.OPTIONS, *model_options.OPTIONS)}
_SHARED = _OPTIONS.keys() | {field.name for field in flag_fields()}
_PARAMETERS = (
    kvanta.SamplingParams,
    kvanta.PoolingParams,
    kvanta.BeamSearchParams,
    kvanta.StructuredOutputsParams,
    kvanta.RepetitionDetectionParams,
)


def parsers() -> Iterator[tuple[str, str, CommandParser]]:
    """Words, line of --help and parser of every command."""
    for name, text in COMMANDS.items():
        if name != "bench":
            yield name, text, importlib.import_module(f"kvanta.cli.{name}").parser()
    for name, text in SUBJECTS.items():
        yield f"bench {name}", text, importlib.import_module(f"kvanta.cli.bench_{name}").parser()


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _flags(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest}`"
    own, *others = action.option_strings
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    dots = " ..." if action.nargs in ("+", "*") else ""
    named = f" ({', '.join(f'`{flag}`' for flag in others)})" if others else ""
    return f"`{own}{value if isinstance(value, str) else ''}{dots}`{named}"


def _rows(actions: Iterable[argparse.Action]) -> list[list[str]]:
    return [
        [_flags(action), " ".join((action.help or "").replace("%%", "%").split())]
        for action in actions
        if action.dest != "MODEL"  # the page says what it may be
    ]


def _commands() -> str:
    parts = []
    for name, text, parser in parsers():
        sections = parser.reference()
        arguments = [action for section in sections for action in section.actions if not action.option_strings]
        words = [each.dest if each.required or each.dest == "MODEL" else f"[{each.dest}]" for each in arguments]
        own = [
            action
            for section in sections
            for action in section.actions
            if action.dest not in _SHARED or section.name not in GROUPS
        ]
        groups = [
            section.name
            for section in sections
            if section.name in GROUPS and any(action.dest in _SHARED for action in section.actions)
        ]
        shared = ", ".join(f"[{group}](#group-{group})" for group in groups)
        parts.append(f"### kvanta {name}\n{text[0].upper()}{text[1:]}.\n")
        options = ["[option ...]"] if groups or any(action.option_strings for action in own) else []
        parts.append(f"    {' '.join([f'kvanta {name}', *words, *options])}")
        parts.append("")
        if own:
            parts.append(_table(("argument or option", "meaning [default]"), _rows(own)))
        if shared:
            parts.append(f"And the groups of common options {shared}.\n")
    return "\n".join(parts)


def _options() -> str:
    """Every common option, in the group and with the help that a command shows."""
    found: dict[str, dict[str, argparse.Action]] = {}
    for _, _, parser in parsers():
        for section in parser.reference():
            shared = {action.dest: action for action in section.actions if action.dest in _SHARED}
            for name, action in shared.items():
                found.setdefault(section.name, {}).setdefault(name, action)
    missing = _SHARED - {name for group in found.values() for name in group}
    if missing:
        raise SystemExit(f"error: no command has {', '.join(sorted(missing))}")
    return "\n".join(
        f"### Group {group}\n{about[0].upper()}{about[1:]}.\n\n"
        + _table(("option", "meaning [default]"), _rows(found[group].values()))
        for group, about in GROUPS.items()
        if group in found
    )


def _llm_options() -> str:
    rows = []
    for group, about in GROUPS.items():
        names = [f"`{option.name}`" for option in _OPTIONS.values() if option.group == group]
        if names:
            rows.append([f"[{group}](reference.md#group-{group})", about, ", ".join(names)])
    return _table(("group", "", "arguments"), rows)


def _texts_of_fields(kind: type[Any]) -> dict[str, str]:
    """The docstring after each field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def _meaning(kind: type[Any], field: dataclasses.Field[Any], texts: dict[str, str]) -> str:
    parts = [field.metadata.get("help", ""), texts.get(field.name, "")]
    known = ". ".join(part.rstrip(".") for part in parts if part)
    if not known:
        raise SystemExit(f"error: {kind.__name__}.{field.name} has neither a docstring nor a help text")
    return known[0].upper() + known[1:] + "."


def _parameters() -> str:
    parts = []
    for kind in _PARAMETERS:
        texts = _texts_of_fields(kind)
        fields = [
            field
            for field in dataclasses.fields(kind)
            if not field.metadata.get("accepted") and not field.metadata.get("refused")
        ]
        without = [field.name for field in dataclasses.fields(kind) if field.metadata.get("accepted")]
        rows = [
            [
                f"`{field.name}`",
                "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`",
                _meaning(kind, field, texts),
            ]
            for field in fields
        ]
        parts.append(f"### {kind.__name__}\n{_summary(kind)}\n\n{_table(('field', 'default', 'meaning'), rows)}")
        if without:
            parts.append(f"Without effect, for compatibility: {', '.join(f'`{name}`' for name in without)}.\n")
    return "\n".join(parts)


def _summary(kind: type[Any]) -> str:
    text = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    return text.split("Raises InputError")[0].rstrip()


def _outputs() -> str:
    kinds: list[Any] = [getattr(kvanta, name) for name in kvanta.__all__]
    classes: list[type[Any]] = [kind for kind in kinds if inspect.isclass(kind) and kind.__module__ == outputs.__name__]
    classes += [kvanta.BeamSearchOutput, kvanta.BeamSearchSequence]
    parts = []
    for kind in classes:
        texts = _texts_of_fields(kind)
        rows = [[f"`{field.name}`", f"`{field.type}`", texts.get(field.name, "")] for field in dataclasses.fields(kind)]
        rows += [
            [f"`{name}`", "property", (inspect.getdoc(value) or "").replace("\n", " ")]
            for name, value in vars(kind).items()
            if isinstance(value, property)
        ]
        parts.append(f"### {kind.__name__}\n{_summary(kind)}\n\n{_table(('field', 'type', 'meaning'), rows)}")
    return "\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {
    "commands": _commands,
    "options": _options,
    "llm-options": _llm_options,
    "parameters": _parameters,
    "outputs": _outputs,
}


def render(page: str) -> str:
    """The page with every block filled."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a block is out of date")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        old = (ROOT / page).read_text()
        new = render(old)
        if new != old:
            stale.append(page)
            if not check:
                (ROOT / page).write_text(new)
    for page in stale:
        print(f"{page}: out of date; run tools/reference.py" if check else f"{page}: written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
