"""`kvanta show`: what a model's files are, and what the engine does with them."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from dataclasses import asdict
from typing import Any

from kvanta import _core
from kvanta.checkpoint.fact import ModelFacts
from kvanta.checkpoint.facts import model_facts
from kvanta.checkpoint.resolve import resolve_model
from kvanta.cli.arguments import CommandParser, add_model, model_of
from kvanta.cli.help_page import page_width
from kvanta.cli.report import add_json, write_report
from kvanta.errors import InputError
from kvanta.fleet.plan import plan
from kvanta.terminal.tables import human_bytes, render_table

_NAME_WIDTH, _SOURCE_WIDTH = 22, 36  # columns, with their margins
_LEAST_VALUE_WIDTH = 20  # in a narrow terminal, whose lines are then too long
_MAX_LINES = 5  # of a problem
_FORMATS = ("bf16", "fp8_e4m3", "int8", "int4")
_DESCRIPTION = """\
What a model's files are, what the engine will do with them, from which file each fact was read, what is ignored, and
what would not work. Weights are not read, only their headers.

  kvanta show Qwen/Qwen3-0.6B
  kvanta show model.gguf --json -

The exit status is 2 if the model cannot be loaded."""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta show", description=_DESCRIPTION)
    add_model(result)
    add_json(result)
    return result


def _caches(path: str, facts: ModelFacts) -> tuple[dict[str, Any], str]:
    """Bytes of a token in the model's own format and in common ones; and the reason why some formats do not fit."""
    report = plan(path)
    sizes = {row["name"]: row["bytes_per_token"] for row in report["formats"]}
    rows = {name: sizes[name] for name in dict.fromkeys((facts.default_cache, *_FORMATS)) if name in sizes}
    known = _core.format_names()
    missing = len(known) - len(sizes)
    heads = sorted({size for _, size in facts.info.layer_heads}) if facts.info else []
    reason = f"{missing} of {len(known)} formats do not take heads of {', '.join(map(str, heads))}" if missing else ""
    return rows, reason


def _entry(text: str) -> list[str]:
    """Its lines; of a long list of alternatives the first ones."""
    lines = textwrap.wrap(text, page_width(), initial_indent="  ", subsequent_indent="    ")
    return [*lines[: _MAX_LINES - 1], "    ... (--json - has all of it)"] if len(lines) > _MAX_LINES else lines


def _text(report: dict[str, Any]) -> str:
    lines = []
    for fact in report["facts"]:
        values = textwrap.wrap(fact["value"], max(page_width() - _NAME_WIDTH - _SOURCE_WIDTH, _LEAST_VALUE_WIDTH)) or [
            ""
        ]
        sources = textwrap.wrap(fact["source"], _SOURCE_WIDTH, break_long_words=False)
        for row, (value, source) in enumerate(itertools.zip_longest(values, sources, fillvalue="")):
            lines.append(["" if row else fact["name"], value, source])
    place = "" if report["path"] == report["model"] else f": {report['path']}"
    parts = [f"{report['model']}{place}"]
    parts += ["", render_table(["", "", "from"], lines, left=(0, 1, 2))] if lines else []
    if report["bytes_per_token"]:
        sizes = ", ".join(f"{name} {human_bytes(size)}" for name, size in report["bytes_per_token"].items())
        parts += ["", textwrap.fill(f"A cached token takes: {sizes}. kvanta plan has all formats.", page_width())]
    for title, entries in (
        ("Without effect", [f"{fact['name']}: {fact['value']}" for fact in report["ignored"]]),
        ("Would not work", report["problems"]),
    ):
        if entries:
            parts += ["", f"{title}:"]
            parts += itertools.chain.from_iterable(map(_entry, entries))
    return "\n".join(parts)


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    folder = resolve_model(model_of(values))
    facts = model_facts(folder.path)
    ignored = [asdict(fact) for fact in facts.ignored]
    sizes: dict[str, Any] = {}
    if facts.info is not None:
        try:
            sizes, reason = _caches(str(folder.path), facts)
            if reason:
                ignored.append({"name": "cache formats", "value": reason, "source": ""})
        except InputError as error:
            facts.problems.append(str(error))
    report = {
        "model": folder.name,
        "path": str(folder.path),
        "loads": facts.loads,
        "facts": [asdict(fact) for fact in facts.facts],
        "bytes_per_token": sizes,
        "ignored": ignored,
        "problems": facts.problems,
    }
    write_report(values.json, report, _text(report))
    return 0 if facts.loads else 2
