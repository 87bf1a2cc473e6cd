#!/usr/bin/env python3
"""Checks the sizes of source files: one subject per file.

    tools/check_sizes.py [ROOT]

Files of src, include, python and bench may have 400 lines, all others 800, with a warning from 400 on. EXCEPTIONS names
the files that are longer today and may not grow; a file that has shrunk must leave the list. Exit status 1 if a file is
over its limit.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

LIMIT = 400
LIMIT_ELSEWHERE = 800
LIBRARY = ("src", "include", "python", "bench")
FOLDERS = (*LIBRARY, "tests", "benchmarks", "examples", "tools", "scripts", "cmake")
SUFFIXES = {".h", ".cc", ".inc", ".cu", ".cuh", ".py", ".pyi", ".sh", ".cmake", ""}
EXCEPTIONS: dict[str, int] = {
    "src/kernels/attention/cpu/amx_values.h": 401,
    "src/kernels/attention/cpu/kernels.h": 450,
}


def is_source(path: Path) -> bool:
    """True for source suffixes, and for files without a suffix that start with `#!`."""
    if path.suffix not in SUFFIXES or "__pycache__" in path.parts or path.is_symlink() or not path.is_file():
        return False
    return path.suffix != "" or path.read_bytes()[:2] == b"#!"


def line_counts(root: Path) -> dict[str, int]:
    """Lines of every source file by its path below the root."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*")) if is_source(file)]
    return {file.relative_to(root).as_posix(): len(file.read_bytes().splitlines()) for file in files}


def limit_of(path: str) -> int:
    return EXCEPTIONS.get(path, LIMIT if path.split("/", maxsplit=1)[0] in LIBRARY else LIMIT_ELSEWHERE)


def main() -> int:
    counts = line_counts(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent))
    longest = sorted(counts.items(), key=lambda item: -item[1])
    errors = [
        f"{path} has {lines} lines, the limit is {limit_of(path)}; split it by subject"
        for path, lines in longest
        if lines > limit_of(path)
    ]
    errors += [
        f"{path} has {counts[path]} lines now; remove it from EXCEPTIONS of tools/check_sizes.py"
        for path in EXCEPTIONS
        if counts.get(path, LIMIT + 1) <= LIMIT
    ]
    for text in errors:
        print(f"error: {text}")
    for path, lines in longest:
        if LIMIT < lines <= limit_of(path):
            print(f"warning: {path} has {lines} lines; over {LIMIT} it probably has more than one subject")
    median = statistics.median(counts.values()) if counts else 0
    print(f"summary: {len(counts)} files, median {median:g} lines, longest {longest[0][1] if longest else 0}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
