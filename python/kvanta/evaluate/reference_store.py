"""References on disk: $KVANTA_HOME/eval/KEY, each a folder with a header and the packed rows of its passages.

Folders are written under another name and renamed, so they are complete; checksums detect later damage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvanta.errors import ResourceError, reason_of
from kvanta.evaluate.passages import Passage
from kvanta.evaluate.row_metrics import ReferenceRows
from kvanta.files.home_folder import kvanta_home

LAYOUT_VERSION = 1
MAX_BYTES = 4 * 2**30
"""Limit of the folder: the least recently used references are removed first."""

_LONGEST_WRITING = 24 * 3600  # seconds
_ATTEMPTS = 100
_ROW = np.dtype([("scale", "<f4"), ("top", "<i4"), ("target", "<f4")])
_HEADER, _CODES, _ROWS = "header.json", "codes.u16", "rows.bin"


def folder_of(key: str) -> Path:
    """Folder of the reference with that key."""
    return kvanta_home() / "eval" / key


def load(key: str, passages: Iterable[Passage] | None, vocab: int) -> tuple[list[Passage], ReferenceRows] | None:
    """The rows of all passages, read from disk on demand; None if they are missing or damaged.

    `passages`: that they must be of; None: whichever they are of.
    """
    folder = folder_of(key)
    try:
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        found = [Passage(tuple(tokens), first) for tokens, first in header["passages"]]
        rows = sum(passage.rows for passage in found)
        same = passages is None or found == list(passages)
        if header["layout"] != LAYOUT_VERSION or header["vocab"] != vocab or not same:
            return None
        codes = np.memmap(folder / _CODES, dtype="<u2", mode="r", shape=(rows, vocab))
        table = np.fromfile(folder / _ROWS, dtype=_ROW)
        if len(table) != rows or codes.nbytes != (folder / _CODES).stat().st_size:
            return None
        if header["checksums"] != [_checksum(codes), zlib.crc32(table.tobytes())]:
            return None
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(folder)  # it has been used
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found, ReferenceRows(codes, table["scale"].copy(), table["top"].copy(), table["target"].copy())


def _checksum(codes: np.ndarray[Any, Any]) -> int:
    value = 0
    for begin in range(0, len(codes), 64):
        value = zlib.crc32(codes[begin : begin + 64].data, value)
    return value


def save(key: str, passages: list[Passage], vocab: int, parts: Iterable[ReferenceRows]) -> None:
    """Writes the rows as `parts` brings them. Raises ResourceError if there is no room, or no right to write."""
    target = folder_of(key)
    working = target.with_name(f".{key}.{uuid.uuid4().hex}")  # process ids repeat on a folder that machines share
    needed = sum(passage.rows for passage in passages) * (2 * vocab + _ROW.itemsize)
    try:
        working.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(working).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free")
        sums = [0, 0]
        with (working / _CODES).open("wb") as codes_file, (working / _ROWS).open("wb") as rows_file:
            for part in parts:
                table = np.empty(len(part), dtype=_ROW)
                table["scale"], table["top"], table["target"] = part.scales, part.top, part.target
                codes = np.ascontiguousarray(part.codes, dtype="<u2")
                sums = [zlib.crc32(codes.data, sums[0]), zlib.crc32(table.tobytes(), sums[1])]
                codes.tofile(codes_file)
                table.tofile(rows_file)
        header = {
            "layout": LAYOUT_VERSION,
            "vocab": vocab,
            "checksums": sums,
            "passages": [[list(passage.tokens), passage.first] for passage in passages],
        }
        (working / _HEADER).write_text(json.dumps(header), encoding="utf-8")
        _publish(working, target, lambda: load(key, passages, vocab) is not None)
    except OSError as error:
        raise ResourceError(
            f"the reference cannot be kept in {target.parent}: {reason_of(error)}; KVANTA_HOME can name another"
        ) from None
    finally:
        shutil.rmtree(working, ignore_errors=True)
    _remove_oldest(target)


def _publish(working: Path, target: Path, is_whole: Callable[[], bool]) -> None:
    """Renames `working` to `target`. One that `is_whole` stays: another process was as fast; a damaged one goes."""
    for _ in range(_ATTEMPTS):
        try:
            working.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if is_whole():
            return
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):  # another process has moved it
            target.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    raise OSError(errno.ENOTEMPTY, f"{target.name} is written by others all the time")


def _remove_oldest(keep: Path) -> None:
    """Until the folder holds at most MAX_BYTES; never `keep`. What a killed process has left goes as well."""
    with contextlib.suppress(OSError):  # another process may do the same
        others = [path for path in keep.parent.iterdir() if path.is_dir() and path != keep]
        room = MAX_BYTES - _size(keep)
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            room -= _size(path)
            being_written = path.name.startswith(".") and time.time() - path.stat().st_mtime < _LONGEST_WRITING
            if (room < 0 or path.name.startswith(".")) and not being_written:
                shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
