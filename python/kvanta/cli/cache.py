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
from kvanta.files.json_file import finite_values
from kvanta.params.checks import one_line, text
from kvanta.terminal.tables import human_bytes, render_table

_DESCRIPTION = """\
The folder of --kv-cache-dir, in which cached prefixes outlive the process.

  kvanta cache ls DIR       models and cache formats, with their pages
  kvanta cache verify DIR   reads every file; exit status 1 if one is damaged
  kvanta cache clear DIR    removes all pages; servers that use the folder go on
  kvanta cache show FILE    what one page file holds; exit status 1 if it is damaged"""


_MAX_PAGE_SIZE = 1 << 20
_MAX_NAME = 200
_MAX_TOKENS_SHOWN = 16
_IDENTITY_LINES = (
    ("model", "architecture"),
    ("weights", "weights"),
    ("scheme", "kv_cache_dtype"),
    ("dtype", "dtype"),
    ("isa", "isa"),
    ("numerics", "numerics_version"),
)


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta cache", description=_DESCRIPTION)
    result.add_argument("ACTION", choices=("ls", "verify", "clear", "show"), help="ls, verify, clear or show")
    result.add_argument("PATH", help="the folder, of show a page file")
    add_json(result)
    return result


def _identity(of: _core.CacheFolderEntry | _core.PageFileInfo) -> Mapping[str, Any]:
    """The content of an identity.json, in which whoever can write to the folder may have written anything."""
    try:
        identity = json.loads(of.identity)
        json.dumps(finite_values(identity), indent=1)
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


def _page(file: str) -> dict[str, Any]:
    """The header of a page file; nothing of it is trusted but `fault`."""
    page = _core.show_page_file(file)
    if page.version == 0 or not page.key:
        return {"file": file, "version": page.version or None, "fault": page.fault}
    return {
        "file": file,
        "version": page.version,
        "record": "exact" if page.exact else "quantized",
        "group": page.group,
        "key": page.key,
        "identity_key": page.identity_key,
        "identity": _identity(page) or None,
        "token_ids": list(page.tokens),
        "payload_bytes": page.payload_bytes,
        "checksum": page.checksum,
        "fault": page.fault or None,
    }


def _side(layer: Mapping[str, Any], name: str) -> str:
    side = layer.get(name)
    return _cell(side.get("format", "?")) if isinstance(side, Mapping) else "-"


def _cell(value: object) -> str:
    return _shown(value if isinstance(value, str) else json.dumps(value))


def _layers(identity: Mapping[str, Any]) -> str:
    """Runs of equal layers, as a table."""
    pages = identity.get("pages")
    layers = pages.get("layers") if isinstance(pages, Mapping) else None
    cells = []
    for layer in layers if isinstance(layers, list) else []:
        if not isinstance(layer, Mapping):
            continue
        run = layer.get("layers")
        names = " to ".join(dict.fromkeys(map(_cell, run))) if isinstance(run, list) else "?"
        numbers = [_cell(layer.get(name, "-")) for name in ("kv_heads", "head_dim")]
        cells.append([names, _cell(layer.get("scheme", "?")), *numbers, _side(layer, "k"), _side(layer, "v")])
    return render_table(["layers", "scheme", "KV heads", "head_dim", "K", "V"], cells, left=(0, 1, 4, 5))


def _page_text(page: Mapping[str, Any]) -> str:
    lines = [("file", _shown(page["file"]))]
    if page["version"] is not None:
        lines.append(("format", f"KVANTAPC, version {page['version']}"))
    identity: Mapping[str, Any] = {}
    if "key" in page:
        identity = page["identity"] or {}
        tokens = page["token_ids"]
        first = ", ".join(str(token) for token in tokens[:_MAX_TOKENS_SHOWN])
        lines += [(name, _cell(identity[key])) for name, key in _IDENTITY_LINES if key in identity]
        lines += [
            ("identity", page["identity_key"] + ("" if identity else ", whose text is not in the folder above")),
            ("page", page["key"]),
            ("record", f"{page['record']}, KV cache group {page['group']}"),
            ("tokens", f"{len(tokens)}: {first}{', ...' if len(tokens) > _MAX_TOKENS_SHOWN else ''}"),
            ("payload", f"{page['payload_bytes']:,} bytes"),
            ("checksum", f"{page['checksum']} (XXH3)"),
        ]
    lines.append(("verified", f"no: {page['fault']}" if page["fault"] else "yes"))
    text = "\n".join(f"  {name:<12}{value}" for name, value in lines)
    return f"{text}\n\n{_layers(identity)}" if identity else text


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    path = text("PATH", values.PATH)
    if values.ACTION == "show":
        page = _page(path)
        write_report(values.json, page, _page_text(page))
        return 1 if page["fault"] else 0
    if values.ACTION == "clear":
        removed = _core.clear_cache_folder(path)
        write_report(values.json, {"removed_files": removed}, f"{removed} files removed")
        return 0
    verified = values.ACTION == "verify"
    look = _core.verify_cache_folder if verified else _core.list_cache_folder
    rows = [_row(entry) for entry in look(path)]
    write_report(values.json, {"entries": rows}, _text(rows, verified))
    return 1 if any(row["damaged"] for row in rows) else 0
