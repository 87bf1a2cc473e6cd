"""Large work in short time slices, so that the event loop's other tasks, and other threads of Python, run in between.

A single call of a C function, such as json.loads of a large body, keeps every thread waiting: a thread alone is not
enough.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from kvanta import _core
from kvanta.server.http.errors import ApiError, json_bytes

SLICE_SECONDS = 0.005
_REST_SECONDS = 0.001
MAX_FIELDS = 1000
_MAX_READ_NS = 15_000_000
_CONTAINER_NS, _FIELD_NS, _COMMA_NS, _DIGIT_NS, _FRACTION_NS = 250, 130, 50, 15, 500
"""Upper estimates of json.loads's time on a Zen 5: for a list or object, a field, a value after a comma, a digit of a
number after its 19th, and the point or exponent of a number."""
_SMALL = 2**15
"""Bytes of a body that is read in about a millisecond, whatever it has."""
_SLICE = 4096
_PIECE = 2**19
_MAX_DEPTH = 20
_CONTAINERS = frozenset({dict, list})


class Pace:
    """Lets other tasks of the event loop run after some milliseconds of work."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    async def rest(self) -> None:
        """Between two slices."""
        if time.perf_counter() - self._begin > SLICE_SECONDS:
            await asyncio.sleep(0)
            self._begin = time.perf_counter()


class BodyReader:
    """Reads the bodies of requests, large ones one after the other."""

    def __init__(self) -> None:
        self._large_body_lock = asyncio.Lock()

    async def read_json(self, body: bytes) -> Any:
        """The value of a body. Raises JSONDecodeError, or ApiError for too many values and too long numbers."""
        try:
            value = await self._read(body)
        except json.JSONDecodeError:
            raise
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body must be JSON in UTF-8: {error.reason} at byte {error.start}") from None
        except ValueError:
            most = sys.get_int_max_str_digits()
            raise ApiError(400, f"the body has a number of more than {most} digits") from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ApiError(400, f"the body has {len(value)} fields; at most {MAX_FIELDS} are read")
        return value

    async def _read(self, body: bytes) -> Any:
        if len(body) <= _SMALL:
            return _loads(body)
        async with self._large_body_lock:
            begin = time.perf_counter()
            try:
                _check_counts(*_core.count_json(body))
                return _loads(body)
            finally:  # others have as much time: a new connection needs several iterations of the event loop
                await asyncio.sleep(time.perf_counter() - begin)


def _loads(body: bytes) -> Any:
    text = _core.without_lone_surrogates(body) or body  # halves of characters that a client has cut
    return json.loads(text.removeprefix(codecs.BOM_UTF8).decode())


def _check_counts(containers: int, fields: int, commas: int, digits: int, fractions: int) -> None:
    """Raises ApiError unless json.loads, which no other thread interrupts, takes less than _MAX_READ_NS or so."""
    parts = (containers * _CONTAINER_NS, fields * _FIELD_NS, commas * _COMMA_NS, digits * _DIGIT_NS)
    if sum(parts) + fractions * _FRACTION_NS > _MAX_READ_NS:
        raise ApiError(
            400,
            f"the body is too large to be read: {containers} lists and objects, {fields} fields, {commas + 1} values, "
            f"{digits} digits after a number's 19th, {fractions} fractions or exponents; at most "
            f"{_MAX_READ_NS // _COMMA_NS} short values are read, fewer of the others",
        )


def large_json_bytes(value: object) -> bytes:
    """Same as json_bytes, on a thread that lets others run in between."""
    return b"".join(_paced(_pieces(value, 0)))


def json_pieces(value: object) -> list[bytes]:
    """The same in pieces of _PIECE bytes or somewhat more, since to copy all of them at once could take too long."""
    pieces: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for piece in _paced(_pieces(value, 0)):
        waiting.append(piece)
        size += len(piece)
        if size >= _PIECE:
            pieces.append(b"".join(waiting))
            waiting, size = [], 0
    return [*pieces, b"".join(waiting)]


def _paced(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Leaves half of the time to others: after each of its system calls the event loop must take the GIL again."""
    begin = time.perf_counter()
    for piece in pieces:
        yield piece
        if time.perf_counter() - begin > _REST_SECONDS:
            time.sleep(_REST_SECONDS)
            begin = time.perf_counter()


def discard(tree: object) -> None:
    """Empties the objects and lists of a large tree, on a thread that lets others run in between.

    To free them together would be one step of Python. Lists of plain values stay: others may have them, too.
    """
    waiting = [tree]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
            each.clear()
        elif isinstance(each, list) and any(isinstance(child, (dict, list)) for child in each[:2]):
            while each:
                waiting += each[-_SLICE:]
                del each[-_SLICE:]


def discard_values(values: list[Any]) -> None:
    """Empties a list of plain values that nobody else has, also in steps."""
    while values:
        del values[-_SLICE:]


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    """Pieces of at most _SLICE values, texts and keys aside; entries of a list are written together up to that."""
    if not isinstance(value, (dict, list)) or depth > _MAX_DEPTH or _size(value, _SLICE) <= _SLICE:
        yield json_bytes(value)
    elif isinstance(value, dict):
        for index, (key, each) in enumerate(value.items()):
            yield (b"," if index else b"{") + json_bytes(str(key)) + b":"
            yield from _pieces(each, depth + 1)
        yield b"}"
    else:
        yield b"["
        for index, (begin, end) in enumerate(_batches(value)):
            if index:
                yield b","
            if end - begin > 1:
                yield json_bytes(value[begin:end])[1:-1]
            else:
                yield from _pieces(value[begin], depth + 1)
        yield b"]"


def _batches(entries: list[Any]) -> Iterator[tuple[int, int]]:
    """Ranges of entries that have at most _SLICE values together, or of a single one."""
    if _CONTAINERS.isdisjoint(map(type, entries)):
        yield from ((begin, min(begin + _SLICE, len(entries))) for begin in range(0, len(entries), _SLICE))
        return
    begin = size = 0
    for index, entry in enumerate(entries):
        added = 1 + (_size(entry, _SLICE) if isinstance(entry, (dict, list)) else 0)
        if index > begin and size + added > _SLICE:
            yield begin, index
            begin, size = index, 0
        size += added
    yield begin, len(entries)


def _size(value: dict[Any, Any] | list[Any], most: int, depth: int = 0) -> int:
    """Number of values in a tree, or some number above `most`."""
    children = value.values() if isinstance(value, dict) else value
    size = len(value)
    if depth == _MAX_DEPTH or size > most or _CONTAINERS.isdisjoint(map(type, children)):
        return size
    for child in children:
        if isinstance(child, (dict, list)):
            size += _size(child, most - size, depth + 1)
            if size > most:
                break
    return size
