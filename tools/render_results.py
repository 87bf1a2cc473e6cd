#!/usr/bin/env python3
"""Fills the tables of README.md and docs/ from the result files that benchmarks wrote; no figure is typed by hand.

    tools/render_results.py [--check] [ROOT]

A block  <!-- results:NAME -->...<!-- /results -->  in a Markdown file is replaced by the table of
docs/results/NAME.json, laid out by TABLES[NAME] of tools/result_tables.py, and a last line with the command that wrote
the file. --check changes nothing and fails if a block differs from its file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from result_tables import TABLES

BLOCK = re.compile(r"(<!-- results:([a-z0-9-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def render(name: str, root: Path) -> str:
    """Content of a block: the table and the command that wrote its file."""
    source = TABLES[name].source if name in TABLES else ""
    file = root / "docs/results" / f"{source or name}.json"
    if name not in TABLES or not file.is_file():
        raise SystemExit(
            f"error: results:{name} needs {file.relative_to(root)} and a row in TABLES ({', '.join(TABLES)})"
        )
    table = TABLES[name]
    rendered = table.render(json.loads(file.read_text()), file.parent)
    return f"\n{rendered}\n(Written by `{table.command}`.)\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, fail if a block is out of date")
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parent.parent)
    options = parser.parse_args()
    root: Path = options.root
    stale, blocks = [], 0
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if not page.is_file():
            continue
        old = page.read_text()
        new, count = BLOCK.subn(lambda m: m[1] + render(m[2], root) + m[3], old)
        blocks += count
        if new != old:
            stale.append(page.relative_to(root).as_posix())
            if not options.check:
                page.write_text(new)
    for path in stale:
        print(f"{path}: out of date; run tools/render_results.py" if options.check else f"{path}: written")
    print(f"summary: {blocks} result tables, {len(stale)} {'out of date' if options.check else 'changed'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
