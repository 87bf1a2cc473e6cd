#!/usr/bin/env python3
"""Puts known faults into a copy of the sources, one by one, and checks that the tests find each.

    tools/mutate.py                     all of tests/mutations.toml
    tools/mutate.py --python            those that need no build
    tools/mutate.py --only NAME...

The copy is a worktree of git at build/mutations with the current tracked files; it stays, so that the next run compiles
what differs. The tests of a fault must pass without it and fail with it. Python runs with the extension that is
installed or linked in this interpreter's package kvanta. Exit status 1 if a fault was not found.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests" / "mutations.toml"
TIMEOUT_SECONDS = 600
"""Time limit of the tests of one fault, which may make them wait forever."""


@dataclass(frozen=True)
class Mutation:
    """A fault in one place."""

    name: str
    fault: str
    file: str
    find: str
    replace: str
    tests: Sequence[str] | str
    """Arguments of pytest, or a filter of GoogleTest."""
    program: str = ""
    """Target of CMake that the filter is for; none: pytest."""

    def apply(self, root: Path) -> None:
        """Changes the file below `root`. Raises ValueError unless the text to replace occurs once."""
        file = root / self.file
        text = file.read_text(encoding="utf-8")
        if text.count(self.find) != 1 or self.find == self.replace:
            raise ValueError(
                f"{self.name}: {self.find!r} occurs {text.count(self.find)} times in {self.file}, not once"
            )
        file.write_text(text.replace(self.find, self.replace), encoding="utf-8")

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """While the context lasts."""
        file = root / self.file
        before = file.read_bytes()
        self.apply(root)
        try:
            yield
        finally:
            file.write_bytes(before)


def read_mutations(file: Path = LIST) -> list[Mutation]:
    """The list."""
    table: Mapping[str, Mapping[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))
    return [Mutation(name=name, **fields) for name, fields in table.items()]


def output_of(*command: str) -> str:
    """Text that a command of git writes in this repository."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def update_copy(tree: Path) -> None:
    """Brings the worktree to the tracked files of this one; changes only those that differ."""
    commit = output_of("git", "stash", "create") or output_of("git", "rev-parse", "HEAD")
    if not (tree / ".git").exists():
        output_of("git", "worktree", "prune")
        output_of("git", "worktree", "add", "--detach", str(tree), commit)
    else:
        output_of("git", "-C", str(tree), "reset", "--hard", commit)
    package = importlib.util.find_spec("kvanta")
    if package is None or package.origin is None:
        raise SystemExit("error: the package kvanta is not installed")
    for built in (*Path(package.origin).parent.glob("_core.*"), Path(package.origin).parent / "shipped"):
        link = tree / "python" / "kvanta" / built.name
        link.unlink(missing_ok=True)
        link.symlink_to(built.resolve())


def build(tree: Path, program: str) -> str:
    """Builds a test program; returns the end of the compiler's output if it fails, else nothing."""
    environment = {**os.environ, "CCACHE_BASEDIR": str(tree)}
    configure = ["cmake", "--preset", "release", "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache", "-DKVANTA_CUDA=OFF"]
    for command in (configure, ["cmake", "--build", "--preset", "release", "--target", program]):
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return (done.stdout + done.stderr)[-2000:]
    return ""


def run_tests(tree: Path, mutation: Mutation) -> str:
    """Builds and runs the tests of a fault in the copy: "pass", "fail", or the reason why they did not run."""
    if mutation.program:
        if reason := build(tree, mutation.program):
            return f"does not build: {reason}"
        program = tree / "build" / "release" / "tests" / mutation.program
        command = [str(program), f"--gtest_filter={mutation.tests}", "--gtest_fail_fast"]
    else:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests]
    # Bytecode of a file that was changed twice within a second would be taken for current.
    environment = {**os.environ, "PYTHONPATH": str(tree / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "fail"
    # 5: pytest has found no test; 2 to 4: it was interrupted, is at fault or was called wrongly.
    if (not mutation.program and done.returncode in range(2, 6)) or "Running 0 tests" in done.stdout:
        return f"{' '.join(command)} does not run: {(done.stdout + done.stderr)[-2000:]}"
    return "pass" if done.returncode == 0 else "fail"


def try_mutation(tree: Path, mutation: Mutation) -> str:
    """Returns "found", or what else has happened."""
    if (without := run_tests(tree, mutation)) != "pass":
        return f"without the fault: {without}"
    with mutation.applied(tree):
        result = run_tests(tree, mutation)
    return {"fail": "found", "pass": "NOT FOUND"}.get(result, result)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--python", action="store_true", help="faults that need no build")
    parser.add_argument("--tree", type=Path, default=ROOT / "build" / "mutations", help="the copy [build/mutations]")
    options = parser.parse_args()
    mutations = read_mutations()
    for name in options.only or ():
        if name not in (names := [each.name for each in mutations]):
            parser.error(f"no fault {name!r}; there are: {', '.join(names)}")
    chosen = [
        each
        for each in mutations
        if (not options.only or each.name in options.only) and not (options.python and each.program)
    ]
    update_copy(options.tree)
    found = 0
    for mutation in chosen:
        result = try_mutation(options.tree, mutation)
        found += result == "found"
        print(f"{mutation.name:<18} {mutation.fault}: {result}", flush=True)
    print(f"summary: {found} of {len(chosen)} faults found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
