"""`kvanta cache`: what a folder of --kv-cache-dir holds."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvanta import _core
from kvanta.cli.arguments import CommandParser
from kvanta.cli.report import add_json, write_report
from kvanta.params.checks import one_line, text
from kvanta.terminal.tables import human_bytes, render_table

_DESCRIPTION = """\
The folder of --kv-cache-dir, in which cached prefixes outlive the process.

  kvanta cache ls DIR       models and cache formats, with their pages
  kvanta cache verify DIR   reads every file; exit status 1 if one is damaged
  kvanta cache clear DIR    removes all pages; servers that use the folder go on"""


_MAX_PAGE_SIZE = 1 << 20
_MAX_NAME = 200


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta cache", description=_DESCRIPTION)
    result.add_argument("ACTION", choices=("ls", "verify", "clear"), help="ls, verify or clear")
    result.add_argument("DIR", help="the folder")
    add_json(result)
    return result


def _identity(entry: _core.CacheFolderEntry) -> Mapping[str, Any]:
    """The content of an identity.json, in which whoever can write to the folder may have written anything."""
    try:
        identity = json.loads(entry.identity)
    except (ValueError, RecursionError):  # lost or damaged: its pages are of no use either
        return {}
    return identity if isinstance(identity, Mapping) else {}


def _row(entry: _core.CacheFolderEntry) -> dict[str, Any]:
    identity = _identity(entry)
    pages = identity.get("pages")
    page_size = pages.get("page_size") if isinstance(pages, Mapping) else None
    names = ("architecture", "kv_cache_dtype", "dtype", "isa")
    return {
        "name": entry.name,
        **{name: identity[name] if isinstance(identity.get(name), str) else "?" for name in names},
        "page_size": page_size if type(page_size) is int and 0 < page_size <= _MAX_PAGE_SIZE else None,
        "pages": entry.pages,
        "files": entry.files,
        "bytes": entry.bytes,
        "last_used": entry.last_used,
        "damaged": list(entry.damaged),
    }


def _shown(name: str) -> str:
    return name if name.isprintable() and len(name) <= _MAX_NAME else one_line(name)


def _text(rows: Sequence[dict[str, Any]], verified: bool) -> str:
    cells = [
        [
            *(_shown(row[name]) for name in ("architecture", "kv_cache_dtype", "isa")),
            f"{row['pages'] * (row['page_size'] or 0):,}",
            f"{row['files']:,}",
            human_bytes(row["bytes"]),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row["last_used"])),
        ]
        for row in rows
    ]
    table = render_table(["model", "format", "isa", "tokens", "files", "size", "last used"], cells, left=(0, 1, 2))
    lines = [table if rows else "no cached prefixes"]
    if verified:
        damaged = [each for row in rows for each in row["damaged"]]
        lines += [*damaged, f"files read: {sum(row['files'] for row in rows):,}, damaged: {len(damaged):,}"]
    return "\n".join(lines)


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    folder = text("DIR", values.DIR)
    if values.ACTION == "clear":
        removed = _core.clear_cache_folder(folder)
        write_report(values.json, {"removed_files": removed}, f"{removed} files removed")
        return 0
    verified = values.ACTION == "verify"
    look = _core.verify_cache_folder if verified else _core.list_cache_folder
    rows = [_row(entry) for entry in look(folder)]
    write_report(values.json, {"entries": rows}, _text(rows, verified))
    return 1 if any(row["damaged"] for row in rows) else 0
