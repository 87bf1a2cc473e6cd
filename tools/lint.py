#!/usr/bin/env python3
"""Runs clang-tidy 14 on the sources of the library, and caches clean results.

    tools/lint.py [--build FOLDER ...] [--jobs N] [FILE ...]

A file is checked again only if it, a project header that it includes, its compile command or .clang-tidy changed: the
cache key, in $XDG_CACHE_HOME/kvanta/lint, is a hash of all of them. Tests are not linted: GoogleTest's macros expand to
findings.
Files of a folder are checked together, as one translation unit, because nearly all of the time goes into the standard
library's headers. Exit status 1 and clang-tidy's output for every group with a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_layers import INCLUDE, resolve

ROOT = Path(__file__).resolve().parent.parent
LINTED = ("src/", "python/bindings/")
OTHER_CPUS = "/x86/" if platform.machine() == "aarch64" else "/arm/"  # sources that this machine does not compile
CLANG_TIDY = "clang-tidy-14"
GROUP = 12
CHECKS = "--checks=-bugprone-suspicious-include"  # the includes of a group are .cc files


def closure(path: str, seen: set[str]) -> Iterator[str]:
    """Returns the file and all project headers that it includes, directly or not, each once."""
    if path in seen:
        return
    seen.add(path)
    yield path
    for line in (ROOT / path).read_text().splitlines():
        found = INCLUDE.match(line)
        if found and (header := resolve(ROOT, found[2])):
            yield from closure(header, seen)


def key_of(path: str, command: str) -> str:
    """Hash of everything that the result for a file depends on."""
    digest = hashlib.sha256(command.replace(str(ROOT), "").encode())
    for name in [".clang-tidy", *sorted(closure(path, set()))]:
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def groups(paths: list[str], commands: dict[str, str]) -> list[list[str]]:
    """Groups files that clang-tidy can check together: of one folder, compiled alike, at most GROUP of them."""
    alike: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        flags = commands[path].split(" -o ")[0]
        alike.setdefault((str(Path(path).parent), flags), []).append(path)
    count = {key: -(-len(members) // GROUP) for key, members in alike.items()}
    return [members[i :: count[key]] for key, members in alike.items() for i in range(count[key])]


def lint(paths: list[str], command: str) -> str:
    """Returns clang-tidy's findings in these files; empty if they are clean."""
    flags = [word for word in shlex.split(command.split(" -o ", maxsplit=1)[0])[1:] if word != "-Werror"]
    with tempfile.NamedTemporaryFile("w", suffix=".cc") as unit:
        unit.write("".join(f'#include "{ROOT / path}"\n' for path in paths))
        unit.flush()
        # g++ flags that clang does not support must not count as findings.
        run = subprocess.run(
            [
                CLANG_TIDY,
                "--quiet",
                "--config-file=.clang-tidy",
                CHECKS,
                unit.name,
                "--",
                *flags,
                "-Wno-unknown-warning-option",
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
    if run.returncode == 0:
        return ""
    # Killed, it has said nothing, and the files have not been checked.
    return run.stdout + run.stderr or f"{CLANG_TIDY} ended with {run.returncode} on {' '.join(paths)}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--build", type=Path, nargs="+", default=[ROOT / "build/debug"], help="folders with compile_commands.json"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("files", nargs="*", help="only these files")
    options = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvanta/lint"
    cache.mkdir(parents=True, exist_ok=True)

    commands = {
        Path(entry["file"]).resolve().relative_to(ROOT).as_posix(): entry["command"]
        for build in reversed(options.build)  # the first build's command wins
        for entry in json.loads((build / "compile_commands.json").read_text())
        if Path(entry["file"]).resolve().is_relative_to(ROOT)
    }
    wanted = {Path(f).resolve().relative_to(ROOT).as_posix() for f in options.files}
    paths = sorted(p for p in commands if p in wanted or (not wanted and p.startswith(LINTED)))
    everything = {file.relative_to(ROOT).as_posix() for folder in LINTED for file in (ROOT / folder).rglob("*.cc")}
    everything = {path for path in everything if OTHER_CPUS not in path}
    if missing := sorted((wanted or everything) - set(paths)):
        parser.error(
            f"no compile command of {', '.join(missing[:4])} ({len(missing)} files); a unity build "
            "(KVANTA_UNITY) has none: run cmake --preset debug"
        )
    keys = {path: key_of(path, commands[path]) for path in paths}
    stale = [path for path in paths if not (cache / keys[path]).exists()]

    def work(group: list[str]) -> str:
        began = time.monotonic()
        findings = lint(group, commands[group[0]])
        if not findings:
            for path in group:
                (cache / keys[path]).touch()
        print(f"{time.monotonic() - began:5.1f} s  {' '.join(group)}", flush=True)
        return findings

    with ThreadPoolExecutor(options.jobs) as pool:
        bad = [findings for findings in pool.map(work, groups(stale, commands)) if findings]
    print(*bad, sep="\n", end="")
    print(f"summary: {len(paths)} files, {len(stale)} looked at, {len(bad)} groups of them with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
