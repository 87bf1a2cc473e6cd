#!/usr/bin/env python3
"""Runs clang-tidy 14 on the sources of the library, and remembers what was clean.

    tools/lint.py [--build build/release] [--jobs N] [FILE ...]

A file is looked at again only if it, a project header that it includes, its compile command or .clang-tidy changed: the
key is a hash of all of them, kept in $XDG_CACHE_HOME/kvanta/lint. Tests are not linted: GoogleTest's macros expand to
findings.
Exit status 1 and clang-tidy's output for every file with a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_layers import INCLUDE, resolve

ROOT = Path(__file__).resolve().parent.parent
LINTED = ("src/", "python/bindings/")
CLANG_TIDY = "clang-tidy-14"


def closure(path: str, seen: set[str]) -> Iterator[str]:
    """The file and all project headers that it includes, directly or not, each once."""
    if path in seen:
        return
    seen.add(path)
    yield path
    for line in (ROOT / path).read_text().splitlines():
        found = INCLUDE.match(line)
        if found and (header := resolve(ROOT, found[2])):
            yield from closure(header, seen)


def key_of(path: str, command: str) -> str:
    """Hash of everything that the verdict on a file depends on."""
    digest = hashlib.sha256(command.replace(str(ROOT), "").encode())
    for name in [".clang-tidy", *sorted(closure(path, set()))]:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def lint(path: str, build: Path) -> str:
    """clang-tidy's findings in one file; empty if it is clean."""
    # g++ flags that clang does not know must not count as findings.
    command = [CLANG_TIDY, "--quiet", f"-p={build}", "--extra-arg=-Wno-unknown-warning-option", str(ROOT / path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if run.returncode == 0 else run.stdout + run.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="folder with compile_commands.json")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("files", nargs="*", help="only these files")
    options = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvanta/lint"
    cache.mkdir(parents=True, exist_ok=True)

    commands = {
        Path(entry["file"]).resolve().relative_to(ROOT).as_posix(): entry["command"]
        for entry in json.loads((options.build / "compile_commands.json").read_text())
        if Path(entry["file"]).resolve().is_relative_to(ROOT)
    }
    wanted = {Path(f).resolve().relative_to(ROOT).as_posix() for f in options.files}
    paths = sorted(p for p in commands if p in wanted or (not wanted and p.startswith(LINTED)))
    keys = {path: key_of(path, commands[path]) for path in paths}
    stale = [path for path in paths if not (cache / keys[path]).exists()]

    def work(path: str) -> str:
        began = time.monotonic()
        findings = lint(path, options.build)
        if not findings:
            (cache / keys[path]).touch()
        print(f"{time.monotonic() - began:5.1f} s  {path}", flush=True)
        return findings

    with ThreadPoolExecutor(options.jobs) as pool:
        bad = [findings for findings in pool.map(work, stale) if findings]
    print(*bad, sep="\n", end="")
    print(f"summary: {len(paths)} files, {len(stale)} looked at, {len(bad)} with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
