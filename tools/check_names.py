#!/usr/bin/env python3
"""Checks that retired names and comment fragments do not come back.

    tools/check_names.py [--write | --count] [ROOT]

Names: no identifier in the code of NAME_FOLDERS and no file in them has a name of the left column of
tools/renamed_names.txt, which says how each line is checked; lines that begin with `~` are not, because the word is the
right name of something else. CHANGELOG.md and docs/adr may use every name. The table in docs/adr/0022-names.md must
agree with that file; --write writes it.

Prose: no comment block, end-of-line comment or docstring in PROSE_FOLDERS begins with Of, What, Where, Whether, Which,
Why, How, Those or Who. Such a comment is a fragment that hides its subject: begin with the noun or the verb. --count
lists the number of them in every file of NAME_FOLDERS instead.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from source_text import CPP_SUFFIXES, Piece, SourceText, read_source, sources

NAME_FOLDERS = ("src", "include", "python", "bench", "benchmarks", "tests", "tools", "examples")
PROSE_FOLDERS = ("src", "include", "python", "bench", "benchmarks", "tools", "examples", "tests")
NAMES = "tools/renamed_names.txt"
TABLE = "docs/adr/0022-names.md"
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
    files = sources(root, NAME_FOLDERS)
    for file in files:
        path = file.relative_to(root).as_posix()
        source = read_source(file)
        prose = fragments(source)
        if options.count:
            problems += [f"{len(prose):4d} {path}"] if prose else []
            continue
        problems += [f"{path}:{text}" for text in names.problems(file, source.names)]
        if path.startswith(tuple(f"{folder}/" for folder in PROSE_FOLDERS)):
            problems += [f"{path}:{text}" for text in prose]
    print(*sorted(problems, reverse=True) if options.count else problems, sep="\n", end="\n" if problems else "")
    found = "with fragments" if options.count else "retired names or fragments"
    print(f"summary: {len(files)} files, {len(problems)} {found}")
    return 1 if problems and not options.count else 0


if __name__ == "__main__":
    sys.exit(main())
