#!/usr/bin/env python3
"""Lists the commands that README.md, CONTRIBUTING.md and docs/ name, with how the tests run each.

    tools/document_commands.py [--check]

tools/data/document_commands.txt has a section per document and a line per command: a word of HOW, a tab, the command.
New commands are added as "undecided", those that no document names any more are removed.
tests/python/test_document_commands.py runs the list. --check changes nothing and fails if the list is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools/data/document_commands.txt"
UNDECIDED = "undecided"
HOW = {
    "run": "runs on the included model, with formats that its heads of 8 channels take, and with less work",
    "server": "its options are read and its engine is made; it is not left running",
    "post": "the request is sent to a server",
    "network": "options and values are checked; it downloads",
    "minutes": "options and values are checked; it takes minutes or hours, or needs files that are not here",
    "gpu": "options and values are checked; it needs a GPU",
    "machines": "options and values are checked; it needs other machines or servers",
    "build": "programs, presets, targets and options are looked up; it compiles or installs",
    "form": "its command and options are looked up; it has placeholders, or is not a whole command",
    "refused": "the command refuses it, as the document says",
    "foreign": "a program of others: nothing to check here",
}
_PROGRAMS = (
    r"(?:\w+=\S+ )*(?:kvanta\s|scripts/\w|tools/\w+\.py|benchmarks/\w+\.py|build/\S+/\w|(?:\S+/)?python3? |"
    r"(?:\S+/)?pip |cmake |ctest |docker |curl |git |helm |kubectl |eval |ray |lm_eval |vllm )"
)
_GENERATED = re.compile(r"<!-- reference:(.*?) -->.*?<!-- /reference -->", re.DOTALL)
_SPAN = re.compile(rf"`({_PROGRAMS}[^`]+)`")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_OTHER_LANGUAGES = ("python", "cpp", "json", "yaml")


def documents() -> list[Path]:
    """The documents, README first."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """Every command of a document's shell blocks and code spans, once, in order; comments are left out."""
    text = _GENERATED.sub("", text)
    blocks = [body for language, body in _FENCE.findall(text) if language not in _OTHER_LANGUAGES]
    text = _FENCE.sub("", text)
    blocks.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [line.removeprefix("$ ") for line in lines if re.match(rf"(?:\$ )?{_PROGRAMS}", line)]
    found = [" ".join(re.split(r"\s{2,}(?=#|[a-z]+ )|\s#\s", line)[0].split()) for line in found]
    found += [" ".join(span.split()) for span in _SPAN.findall(text)]
    return list(dict.fromkeys(found))


def read_list() -> dict[str, dict[str, str]]:
    """Document -> command -> word of HOW."""
    sections: dict[str, dict[str, str]] = {}
    for line in LIST.read_text().splitlines() if LIST.exists() else ():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            how, command = line.split("\t")
            section[command] = how
    return sections


def current() -> dict[str, dict[str, str]]:
    """The list as it should be: the decisions are kept."""
    known = read_list()
    found = {}
    for file in documents():
        name = file.relative_to(ROOT).as_posix()
        rows = {command: known.get(name, {}).get(command, UNDECIDED) for command in commands(file.read_text())}
        if rows:
            found[name] = rows
    return found


def render(sections: dict[str, dict[str, str]]) -> str:
    """The file's text."""
    lines = ["# Commands in documents, and how the tests run them: tools/document_commands.py", "#"]
    lines += [f"# {how}: {meaning}" for how, meaning in HOW.items()]
    for name, rows in sections.items():
        lines += ["", f"[{name}]", *(f"{how}\t{command}" for command, how in rows.items())]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if the list is out of date")
    check = parser.parse_args().check
    sections = current()
    text = render(sections)
    stale = not LIST.exists() or LIST.read_text() != text
    if stale and not check:
        LIST.write_text(text)
    counts = sum(len(rows) for rows in sections.values())
    undecided = [command for rows in sections.values() for command, how in rows.items() if how not in HOW]
    print(f"summary: {counts} commands in {len(sections)} documents, {len(undecided)} undecided")
    return 1 if undecided or (stale and check) else 0


if __name__ == "__main__":
    sys.exit(main())
