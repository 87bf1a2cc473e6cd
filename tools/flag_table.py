#!/usr/bin/env python3
"""Compares the options of vLLM, SGLang and Aphrodite with ours, and writes docs/flags.md.

    tools/flag_table.py [--check]

Every option of the lists tools/data/ENGINE_flags.txt (tools/flag_lists.py makes them) must be known to `kvanta serve`:
honoured, accepted because it means nothing here, or refused; python/kvanta/options/ignored.py and refused_options.py
have the reasons. --check writes nothing and fails if an option is unknown or the document is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvanta.cli import serve
from kvanta.cli.arguments import CommandParser
from kvanta.options import engine as engine_options
from kvanta.options import model as model_options
from kvanta.options.foreign import Meaning, meaning
from kvanta.server import options as server_options

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "flags.md"
ENGINES = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23", "aphrodite": "Aphrodite 0.24.1"}
KINDS = ("honoured", "accepted", "refused", "unknown")
_HEAD = """\
# Options of other servers

`kvanta serve` knows every option of vLLM, SGLang and Aphrodite. Every option is implemented ("honoured"), ignored with
a notice ("accepted"), or rejected with a reason ("refused"). Values that request nothing (null, false, the default) are
always accepted. `LLM` does the same with the names as arguments (underscores for dashes). Underscores, `--no-` forms of
switches, vLLM's short flags, its `--some-config.key VALUE` for JSON, and `--config FILE` (YAML or JSON) work as there.
An honoured option may refuse single values: [reference.md](reference.md) has the options. Written by
`tools/flag_table.py` from the engines' lists.
"""


@dataclass(frozen=True)
class Flag:
    """An option of an engine."""

    names: tuple[str, ...]
    value: str
    """Empty, "=" or "=+"."""

    @property
    def name(self) -> str:
        """The name of the argument."""
        return self.names[0].removeprefix("--").replace("-", "_")


def read_flags(engine: str) -> list[Flag]:
    """The options of an engine; each long name of an option is listed as an option."""
    flags = []
    for line in (ROOT / "tools" / "data" / f"{engine}_flags.txt").read_text(encoding="utf-8").splitlines():
        words = line.split()
        value = words.pop() if words[-1].startswith("=") else ""
        short = tuple(word for word in words if not word.startswith("--"))
        flags += [Flag((word, *short), value) for word in words if word.startswith("--")]
    return flags


def fate(parser: CommandParser, flag: Flag) -> Meaning:
    """Honoured, accepted, refused; unknown also when the parser lacks a name or takes another number of values."""
    actions = [parser.action_of(name) for name in flag.names]
    if flag.name == "config":
        return Meaning("honoured", "")
    found = meaning(flag.name, ours())
    if any(action is None for action in actions):
        return Meaning("unknown", f"kvanta serve lacks one of {' '.join(flag.names)}")
    takes_value = actions[0] is not None and actions[0].nargs != 0
    if found.kind != "refused" and takes_value != bool(flag.value):
        return Meaning("unknown", f"kvanta serve takes {'a' if takes_value else 'no'} value for {flag.names[0]}")
    return found


def ours() -> set[str]:
    """Names of options that have an effect."""
    groups = (engine_options.OPTIONS, model_options.OPTIONS, server_options.OPTIONS)
    names = {name for options in groups for option in options for name in option.names}
    return names | {*server_options.OPPOSITES, "model", "model_path"}


def fates() -> dict[str, list[tuple[Flag, Meaning]]]:
    """Every option of every engine with its fate."""
    parser = serve.parser()
    return {engine: [(flag, fate(parser, flag)) for flag in read_flags(engine)] for engine in ENGINES}


def counts(table: dict[str, list[tuple[Flag, Meaning]]]) -> dict[str, Counter[str]]:
    """Options by engine and kind."""
    return {engine: Counter(found.kind for _, found in rows) for engine, rows in table.items()}


def render(table: dict[str, list[tuple[Flag, Meaning]]]) -> str:
    """The document."""
    lines = [_HEAD, "| engine | options | honoured | accepted | refused | unknown |", "|---|---:|---:|---:|---:|---:|"]
    for engine, kinds in counts(table).items():
        numbers = " | ".join(str(kinds[kind]) for kind in KINDS)
        lines.append(f"| {ENGINES[engine]} | {sum(kinds.values())} | {numbers} |")
    by_flag: dict[str, Meaning] = {}
    for rows in table.values():
        for flag, found in rows:
            by_flag.setdefault(flag.names[0], found)
    return "\n".join([*lines, *sections(by_flag, "##")]) + "\n"


def sections(fates: Mapping[str, Meaning], mark: str) -> Iterator[str]:
    """Lines with the names of each kind, by the reason. `mark`: of a heading."""
    for kind, title in zip(KINDS, ("Honoured", "Accepted without effect", "Refused", "Unknown"), strict=True):
        of_kind = {name: found for name, found in sorted(fates.items()) if found.kind == kind}
        if not of_kind:
            continue
        yield from ("", f"{mark} {title}")
        for reason in sorted({found.reason for found in of_kind.values()}):
            names = ", ".join(f"`{name}`" for name, found in of_kind.items() if found.reason == reason)
            yield from ("", f"{reason[:1].upper()}{reason[1:]}: {names}" if reason else names)


def write_or_check(text: str, document: Path, tool: str, *, check: bool) -> bool:
    """Writes the document; with `check` writes nothing. False, and says so, if it is out of date."""
    if not check:
        document.write_text(text, encoding="utf-8")
    elif document.read_text(encoding="utf-8") != text:
        print(f"docs/{document.name} is out of date: run tools/{tool}", file=sys.stderr)
        return False
    return True


def main() -> int:
    """Writes or checks the document; prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if the document is out of date")
    check = parser.parse_args().check
    table = fates()
    for engine, kinds in counts(table).items():
        print(f"{ENGINES[engine]}: " + ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS))
    unknown = [
        (engine, flag, found) for engine, rows in table.items() for flag, found in rows if found.kind == "unknown"
    ]
    for engine, flag, found in unknown:
        print(f"unknown: {flag.names[0]} of {ENGINES[engine]} {found.reason}", file=sys.stderr)
    current = write_or_check(render(table), DOCUMENT, "flag_table.py", check=check)
    return 0 if current and not unknown else 1


if __name__ == "__main__":
    raise SystemExit(main())
