#!/usr/bin/env python3
"""Checks the sizes of source files: one subject a file.

    tools/check_sizes.py [ROOT]

Over 400 lines is a smell (a warning), over 800 an error; no file is exempt. The median should stay at about 150.
Exit status 1 if a file is over the limit.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

SMELL = 400
LIMIT = 800
FOLDERS = ("src", "include", "python", "tests", "benchmarks", "examples", "tools", "scripts", "cmake")
SUFFIXES = {".h", ".cc", ".inc", ".cu", ".cuh", ".py", ".pyi", ".sh", ".cmake", ""}


def is_source(path: Path) -> bool:
    """Whether a file counts: its suffix is a source's, or it has none and starts with `#!`."""
    if path.suffix not in SUFFIXES or "__pycache__" in path.parts or not path.is_file():
        return False
    return path.suffix != "" or path.read_bytes()[:2] == b"#!"


def line_counts(root: Path) -> dict[str, int]:
    """Lines of every source file by its path below the root."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*")) if is_source(file)]
    return {file.relative_to(root).as_posix(): len(file.read_bytes().splitlines()) for file in files}


def main() -> int:
    counts = line_counts(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent))
    longest = sorted(counts.items(), key=lambda item: -item[1])
    for path, lines in longest:
        if lines > LIMIT:
            print(f"error: {path} has {lines} lines, the limit is {LIMIT}; split it by subject")
        elif lines > SMELL:
            print(f"warning: {path} has {lines} lines; over {SMELL} it probably holds more than one subject")
    median = statistics.median(counts.values()) if counts else 0
    print(f"summary: {len(counts)} files, median {median:g} lines, longest {longest[0][1] if longest else 0}")
    return 1 if any(lines > LIMIT for lines in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
