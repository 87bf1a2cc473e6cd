"""Large work in small bites, so that the event loop's other tasks, and other threads of Python, run in between.

A single call of a C function, such as json.loads of a large body, keeps every thread waiting: a thread alone is not
enough.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from json import decoder, scanner
from typing import Any

from kvanta.server.errors import ApiError, json_bytes

BITE_SECONDS = 0.005
_MAX_COMMAS = 2**17
_MAX_MARKS = 20_000
"""Brackets and colons of a text that json.loads reads in less than about 20 ms."""
_MAX_FLOATS = 8192
"""Numbers that are no integers; each may take a microsecond."""
_MAX_CONTAINERS = 100_000
MAX_FIELDS = 1000
_DIGITS = 2**14
_DIGITS_PER_NUMBER = 8
"""On average; reading a number takes the square of its digits. More than _DIGITS are looked at."""
_SMALL = 2**15
"""Bytes of a body that is read in about a millisecond, whatever it has."""
_SLICE = 4096
_PIECE = 2**19
_MAX_DEPTH = 6
_LONG = 64
"""Entries of a list that is written in pieces at any depth."""


class Pace:
    """Lets other tasks of the event loop run after some milliseconds of work."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    async def rest(self) -> None:
        """Between two bites."""
        if time.perf_counter() - self._begin > BITE_SECONDS:
            await asyncio.sleep(0)
            self._begin = time.perf_counter()


class BodyReader:
    """Reads the bodies of requests, large ones one after the other."""

    def __init__(self, off_loop: Callable[[Callable[[], Any]], Any]) -> None:
        """`off_loop(function)`: calls it on another thread."""
        self._off_loop = off_loop
        self._turn = asyncio.Lock()

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
        value: Any
        if len(body) <= _SMALL:
            value = json.loads(body)
        elif _is_quick(body):
            async with self._turn:  # one in each iteration of the event loop
                value = json.loads(body)
                await asyncio.sleep(0)
        else:
            value = await self._off_loop(
                lambda: _Decoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))
            )
        return value


def _is_quick(body: bytes) -> bool:
    """True for a body that json.loads reads in less than about 20 ms."""
    commas = body.count(b",")
    marks = body.count(b"[") + body.count(b"{") + body.count(b":")
    if commas > _MAX_COMMAS or marks > _MAX_MARKS:
        return False
    digits = len(body) - len(body.translate(None, b"0123456789"))
    if digits > _DIGITS + _DIGITS_PER_NUMBER * (commas + marks):
        return False
    return commas + marks <= _MAX_FLOATS or sum(map(body.count, (b".", b"e", b"E"))) <= _MAX_FLOATS


class _Decoder(json.JSONDecoder):
    """Written in Python but for its strings; other threads run in between."""

    def __init__(self) -> None:
        super().__init__()
        self._containers = 0
        parse_object: Any = decoder.JSONObject  # type: ignore[attr-defined]
        parse_array: Any = decoder.JSONArray  # type: ignore[attr-defined]
        self.parse_object = self._counted(parse_object)
        self.parse_array = self._counted(parse_array)
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self._containers += 1
            if self._containers > _MAX_CONTAINERS:
                raise ApiError(400, f"the body has more than {_MAX_CONTAINERS} lists and objects")
            return parse(*arguments)

        return counted


def large_json_bytes(value: object) -> bytes:
    """As json_bytes, on a thread that lets others run in between."""
    return b"".join(_pieces(value, 0))


def json_pieces(value: object) -> list[bytes]:
    """The same in pieces of _PIECE bytes or somewhat more, since to copy all of them at once could take too long."""
    pieces: list[bytes] = []
    waiting: list[bytes] = []
    size = 0
    for piece in _pieces(value, 0):
        waiting.append(piece)
        size += len(piece)
        if size >= _PIECE:
            pieces.append(b"".join(waiting))
            waiting, size = [], 0
    return [*pieces, b"".join(waiting)]


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


def _pieces(value: object, depth: int) -> Iterator[bytes]:
    if (
        isinstance(value, dict)
        and depth < _MAX_DEPTH
        and any(isinstance(each, (dict, list)) for each in value.values())
    ):
        for index, (key, each) in enumerate(value.items()):
            yield (b"," if index else b"{") + json_bytes(str(key)) + b":"
            yield from _pieces(each, depth + 1)
        yield b"}"
    elif isinstance(value, list) and len(value) > _SLICE and not isinstance(value[0], (dict, list)):
        for begin in range(0, len(value), _SLICE):
            yield (b"," if begin else b"[") + json_bytes(value[begin : begin + _SLICE])[1:-1]
        yield b"]"
    elif (
        isinstance(value, list)
        and (depth < _MAX_DEPTH or len(value) > _LONG)
        and any(isinstance(each, (dict, list)) for each in value)
    ):
        for index, each in enumerate(value):
            yield b"," if index else b"["
            yield from _pieces(each, depth + 1)
        yield b"]"
    else:
        yield json_bytes(value)
