#!/usr/bin/env python3
"""Checks that retired names, comment fragments and crutches of prose do not come back.

    tools/check_names.py [--write | --count] [ROOT]

Names: no identifier in the code of NAME_FOLDERS and no file in them has a name of the left column of
tools/renamed_names.txt, which says how each line is checked; lines that begin with `~` are not, because the word is the
right name of something else. CHANGELOG.md and docs/adr may use every name. The table in docs/adr/0022-names.md must
agree with that file; --write writes it.

Prose: no comment block, end-of-line comment or docstring in PROSE_FOLDERS begins with Of, What, Where, Whether, Which,
Why, How, Those or Who. Such a comment is a fragment that hides its subject: begin with the noun or the verb. --count
lists the number of them in every file of NAME_FOLDERS instead.

Crutches: no comment, docstring, string or Markdown text of PROSE_CRUTCH_FOLDERS has a phrase of
tools/prose_crutches.txt, which says what to write instead and lists the uses that are right.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from source_text import CPP_SUFFIXES, Piece, SourceText, read_source, sources

NAME_FOLDERS = ("src", "include", "python", "bench", "benchmarks", "tests", "tools", "examples")
PROSE_FOLDERS = ("src", "include", "python", "bench", "benchmarks", "tools", "examples", "tests")
# Folders and files whose prose is checked for crutches; text that quotes them is not prose.
PROSE_CRUTCH_FOLDERS = (
    *("src", "include", "bench", "benchmarks", "python", "tests", "tools", "scripts", "examples", "docs"),
    *("README.md", "AGENTS.md", "CONTRIBUTING.md"),
)
PROSE_CRUTCH_QUOTES = ("tests/python/test_tools.py",)
CRUTCHES = "tools/prose_crutches.txt"
NAMES = "tools/renamed_names.txt"
TABLE = "docs/adr/0022-names.md"
FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
FRAGMENT = re.compile(r"(Of|What|Where|Whether|Which|Why|How|Those|Who)\b")
BLOCK = re.compile(r"(?<=<!-- names -->\n).*(?=<!-- /names -->)", re.DOTALL)


@dataclass(frozen=True)
class Rename:
    """One line of the list. `reason`: why the old name is not checked; empty where it is."""

    area: str
    old: str
    new: str
    public: bool
    reason: str

    @property
    def word(self) -> str:
        """The identifier that is looked for: the last part of a qualified name, without the `*` of a prefix."""
        return self.old.split("::")[-1].rstrip("*")

    def cpp_only(self) -> bool:
        return re.fullmatch("[a-z]+", self.word) is not None

    def pattern(self) -> str:
        if self.old.endswith("*"):
            return f"{self.word}(_\\w*)?|k{self.word.capitalize()}([A-Z]\\w*)?"
        return re.escape(self.word)


def read_renames(root: Path) -> list[Rename]:
    renames: list[Rename] = []
    area = ""
    for line in (root / NAMES).read_text().splitlines():
        text, _, reason = line.partition("#")
        if line.startswith("["):
            area = line.strip("[]")
        elif text.strip():
            old, new = text.split(maxsplit=1)
            name, public = re.subn(r"\s+public$", "", new.strip())
            unchecked = old.startswith("~")
            if unchecked and not reason:
                raise SystemExit(f"error: {NAMES}: {old} needs a reason for not being checked: `{line} # why`")
            renames.append(Rename(area, old.lstrip("~"), name, bool(public), reason.strip() if unchecked else ""))
    return renames


class NameCheck:
    """Finds retired names in the code and among the file names."""

    def __init__(self, renames: list[Rename]) -> None:
        checked = [rename for rename in renames if not rename.reason]
        self._files = {Path(rename.old).stem: rename.new for rename in checked if rename.old.endswith(".h")}
        names = [rename for rename in checked if not rename.old.endswith(".h")]
        self._rules = {
            cpp: [(re.compile(rename.pattern()), rename) for rename in names if cpp or not rename.cpp_only()]
            for cpp in (True, False)
        }
        self._known: dict[tuple[str, bool], Rename | None] = {}

    def _find(self, name: str, cpp: bool) -> Rename | None:
        key = (name, cpp)
        if key not in self._known:
            self._known[key] = next((rename for rule, rename in self._rules[cpp] if rule.fullmatch(name)), None)
        return self._known[key]

    def problems(self, file: Path, names: list[Piece]) -> list[str]:
        cpp = file.suffix in CPP_SUFFIXES
        found = [(piece, self._find(piece.text, cpp)) for piece in names]
        texts = [f"{piece.line}: {piece.text} is called {rename.new}" for piece, rename in found if rename]
        if cpp and file.stem in self._files:
            texts.insert(0, f"1: the file's name is {self._files[file.stem]}")
        return texts


def fragments(source: SourceText) -> list[str]:
    found = [(piece, FRAGMENT.match(piece.text)) for piece in source.comments]
    return [
        f'{piece.line}: comment begins with "{match[0]}"; begin with its subject or a verb: {piece.text[:50]!r}'
        for piece, match in found
        if match
    ]


class CrutchCheck:
    """Finds phrases that read as translated; the list says what to write instead."""

    def __init__(self, root: Path) -> None:
        file = root / CRUTCHES
        lines = file.read_text().splitlines() if file.is_file() else []
        entries = [line.partition(" -> ") for line in lines if line.strip() and not line.startswith("#")]
        self._right = re.compile("|".join(phrase for phrase, arrow, _ in entries if not arrow) or "(?!)", re.IGNORECASE)
        self._rules = [
            (re.compile(rf"\b(?:{phrase.strip()})\b", re.IGNORECASE), advice.strip())
            for phrase, arrow, advice in entries
            if arrow
        ]

    def problems(self, pieces: Iterable[Piece]) -> list[str]:
        found: dict[tuple[int, str], str] = {}
        for piece in pieces:
            text = self._right.sub(lambda match: "." * len(match[0]), piece.text)
            for rule, advice in self._rules:
                for match in rule.finditer(text):
                    line = piece.line + text.count("\n", 0, match.start())
                    around = " ".join(piece.text[max(match.start() - 40, 0) : match.end() + 20].split())
                    found.setdefault((line, match[0]), f'{line}: "{match[0]}": write {advice}: {around!r}')
        return [found[key] for key in sorted(found)]


def markdown(text: str) -> list[Piece]:
    """The paragraphs of a page, without its fenced code."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    starts = [0, *(match.end() for match in re.finditer(r"\n\n", text)), len(text)]
    return [Piece(text.count("\n", 0, start) + 1, text[start:end]) for start, end in pairwise(starts)]


def within(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def table(renames: list[Rename]) -> str:
    """The table of the ADR; public names in bold."""
    rows: dict[str, dict[str, list[str]]] = {}
    for each in renames:
        old = f"**`{each.old}`**" if each.public else f"`{each.old}`"
        rows.setdefault(each.area, {}).setdefault(each.new, []).append(old)
    lines = ["\n| area | was | is |\n| --- | --- | --- |\n"]
    for area, names in rows.items():
        lines += [f"| {area} | {', '.join(old)} | `{new}` |\n" for new, old in names.items()]
    return "".join(lines) + "\n"


def check_table(root: Path, renames: list[Rename], write: bool) -> list[str]:
    page = root / TABLE
    if not page.is_file():
        return []
    old = page.read_text()
    new = BLOCK.sub(lambda _: table(renames), old)
    if new == old:
        return []
    if write:
        page.write_text(new)
        return []
    return [f"{TABLE}: differs from {NAMES}; run tools/check_names.py --write"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table of {TABLE}")
    parser.add_argument("--count", action="store_true", help="list how many comment fragments each file has")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parent.parent)
    options = parser.parse_args()
    root: Path = options.root
    renames = read_renames(root)
    problems = check_table(root, renames, options.write)
    names = NameCheck(renames)
    crutches = CrutchCheck(root)
    files = sources(root, NAME_FOLDERS)
    for file in files:
        path = file.relative_to(root).as_posix()
        source = read_source(file)
        prose = fragments(source)
        if options.count:
            problems += [f"{len(prose):4d} {path}"] if prose else []
            continue
        problems += [f"{path}:{text}" for text in names.problems(file, source.names)]
        if within(path, PROSE_FOLDERS):
            problems += [f"{path}:{text}" for text in prose]
        if within(path, PROSE_CRUTCH_FOLDERS) and path not in PROSE_CRUTCH_QUOTES:
            problems += [f"{path}:{text}" for text in crutches.problems(source.comments + source.strings)]
    for page in sorted(root.rglob("*.md")) if not options.count else []:
        path = page.relative_to(root).as_posix()
        if within(path, PROSE_CRUTCH_FOLDERS):
            problems += [f"{path}:{text}" for text in crutches.problems(markdown(page.read_text()))]
    print(*sorted(problems, reverse=True) if options.count else problems, sep="\n", end="\n" if problems else "")
    found = "with fragments" if options.count else "retired names, fragments or crutches"
    print(f"summary: {len(files)} files, {len(problems)} {found}")
    return 1 if problems and not options.count else 0


if __name__ == "__main__":
    sys.exit(main())
