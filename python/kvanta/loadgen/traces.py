"""Real serving traces as workloads: arrival times and lengths, and for Mooncake's also which prompt parts are shared.

Azure (Splitwise, ISCA 2024): CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; of 2023 and 2024.
BurstGPT (KDD 2025): CSV with the columns Timestamp in seconds, Request tokens, Response tokens. Requests that failed
have a response of no tokens, and are left out.
Mooncake (FAST 2025): JSON lines with timestamp in milliseconds, input_length, output_length and hash_ids, one id for
each 512 tokens of the prompt; requests with equal leading ids have that part of the prompt in common.
Lengths, as of ShareGPT's conversations: JSON lines with input_length and output_length, and no times.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from kvanta.errors import InputError, reason_of
from kvanta.loadgen.workload import MAX_REQUESTS, MAX_TOKENS, PlannedRequest, Workload
from kvanta.params.checks import one_line

MOONCAKE_BLOCK = 512
_LONGEST_LINE = 1 << 20
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_time_of = operator.attrgetter("time_s")
LENGTHS = "lengths"
"""The format without times."""


@dataclass(frozen=True)
class _Row:
    time_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(
    file: str | os.PathLike[str],
    *,
    trace_format: str = "auto",
    requests: int | None = None,
    length_scale: float = 1.0,
    max_input: int | None = None,
    max_output: int | None = None,
) -> Workload:
    """The first `requests` rows by time (all: None), arrivals from 0 on.

    Lengths are multiplied by `length_scale`, shared blocks with them, then cut at the maxima; none becomes less than 1.
    Raises InputError that names the line.
    """
    if trace_format not in ("auto", *_READERS):
        raise InputError(f"no trace format {trace_format!r}; known: auto, {', '.join(_READERS)}")
    if not 0 < length_scale < math.inf:
        raise InputError(f"the length scale must be above 0, got {length_scale:g}")
    for name, most in (("input", max_input), ("output", max_output), ("request", requests)):
        if most is not None and most < 1:
            raise InputError(f"the most {name}s are {most}; it must be at least 1")
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as lines:
            kind = _detect(lines, file) if trace_format == "auto" else trace_format
            found = _READERS[kind](lines, str(file))
            limit = MAX_REQUESTS + 1
            if requests is None:
                rows = sorted(itertools.islice(found, limit), key=_time_of)
            else:  # BurstGPT's files have more than MAX_REQUESTS rows
                rows = heapq.nsmallest(min(requests, limit), found, key=_time_of)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte, or not UTF-8
        if isinstance(error, InputError):
            raise
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason_of(error)
        raise InputError(f"cannot read the trace {os.fspath(file)!r}: {reason}") from None
    if not rows:
        raise InputError(f"the trace {os.fspath(file)!r} has no requests")
    if len(rows) > MAX_REQUESTS:
        raise InputError(f"the trace {os.fspath(file)!r} has more than {MAX_REQUESTS:,} requests")
    block_tokens = max(1, round(MOONCAKE_BLOCK * length_scale))
    planned = [
        PlannedRequest(
            index=index,
            arrival_s=row.time_s - rows[0].time_s,
            input_tokens=_scaled(row.input_tokens, length_scale, max_input),
            output_tokens=_scaled(row.output_tokens, length_scale, max_output),
            blocks=row.blocks,
            block_tokens=block_tokens if row.blocks else 0,
        )
        for index, row in enumerate(rows)
    ]
    source = {
        "kind": kind,
        "file": Path(file).name,
        "length_scale": length_scale,
        "max_input_len": max_input,
        "max_output_len": max_output,
    }
    return Workload(tuple(planned), source)


def _scaled(tokens: int, scale: float, most: int | None) -> int:
    scaled = max(1, round(tokens * scale))
    return scaled if most is None else min(scaled, most)


def _detect(lines: TextIO, file: str | os.PathLike[str]) -> str:
    start = lines.read(4096).lstrip()
    lines.seek(0)
    if start.startswith("{"):
        first = start.partition("\n")[0]
        return "mooncake" if '"timestamp"' in first or '"hash_ids"' in first else LENGTHS
    if start.startswith(_AZURE_COLUMNS[0]):
        return "azure"
    if start.startswith(_BURSTGPT_COLUMNS[0]):
        return "burstgpt"
    raise InputError(
        f"the trace {os.fspath(file)!r} begins with {one_line(start[:40])}: neither Azure's header "
        f"({','.join(_AZURE_COLUMNS)}) nor BurstGPT's ({', '.join(_BURSTGPT_COLUMNS)}) nor a JSON object as Mooncake's "
        "lines are"
    )


def _bounded(lines: TextIO, file: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, without blank ones."""
    for number in itertools.count(1):
        line = lines.readline(_LONGEST_LINE)
        if not line:
            return
        if len(line) == _LONGEST_LINE:
            raise InputError(f"{file}:{number}: a line of more than {_LONGEST_LINE:,} characters")
        if line.strip():
            yield number, line


def _table(lines: TextIO, file: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file by the names in its header, with the numbers of their lines."""
    header: list[str] | None = None
    for number, line in _bounded(lines, file):
        try:
            (cells,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError) as error:
            raise InputError(f"{file}:{number}: {error}") from None
        if header is None:
            header = [cell.strip() for cell in cells]
            missing = [name for name in columns if name not in header]
            if missing:
                raise InputError(f"{file}:{number}: no column {missing[0]} in the header {one_line(line.strip())}")
            continue
        if len(cells) != len(header):
            raise InputError(f"{file}:{number}: {len(cells)} columns, the header has {len(header)}")
        yield number, dict(zip(header, cells, strict=True))


def _azure(lines: TextIO, file: str) -> Iterator[_Row]:
    zone: tuple[bool, int] | None = None
    for number, row in _table(lines, file, _AZURE_COLUMNS):
        time = _moment(row["TIMESTAMP"], file, number)
        if zone is not None and zone[0] != (time.tzinfo is not None):
            raise InputError(f"{file}:{number}: a time with a zone and, in line {zone[1]}, one without")
        zone = zone or (time.tzinfo is not None, number)
        yield _Row(
            time.replace(tzinfo=time.tzinfo or UTC).timestamp(),
            _tokens(row["ContextTokens"], "ContextTokens", file, number),
            _tokens(row["GeneratedTokens"], "GeneratedTokens", file, number),
        )


def _burstgpt(lines: TextIO, file: str) -> Iterator[_Row]:
    for number, row in _table(lines, file, _BURSTGPT_COLUMNS):
        try:
            time = float(row["Timestamp"])
        except ValueError:
            time = math.nan
        if not 0 <= time < 1e12:
            raise InputError(f"{file}:{number}: Timestamp must be seconds from 0 on, got {one_line(row['Timestamp'])}")
        prompt, answer = (_tokens(row[name], name, file, number) for name in _BURSTGPT_COLUMNS[1:])
        if answer > 0:
            yield _Row(time, prompt, answer)


def _moment(text: str, file: str, number: int) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        raise InputError(
            f"{file}:{number}: TIMESTAMP must be a time such as 2023-11-16 18:15:46, got {one_line(text)}"
        ) from None


def _objects(lines: TextIO, file: str, names: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """JSON objects with these keys, with the numbers of their lines."""
    for number, line in _bounded(lines, file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise InputError(f"{file}:{number}: {one_line(line.strip())} is not a JSON object") from None
        if not isinstance(row, Mapping):
            raise InputError(f"{file}:{number}: {one_line(row)} is not a JSON object")
        absent = [name for name in names if name not in row]
        if absent:
            raise InputError(f"{file}:{number}: no {absent[0]!r}")
        yield number, row


def _lengths(lines: TextIO, file: str) -> Iterator[_Row]:
    names = ("input_length", "output_length")
    for number, row in _objects(lines, file, names):
        prompt, answer = (_tokens(row[name], name, file, number) for name in names)
        yield _Row(0.0, prompt, answer)


def _mooncake(lines: TextIO, file: str) -> Iterator[_Row]:
    for number, row in _objects(lines, file, ("timestamp", "input_length", "output_length")):
        tokens = _tokens(row["input_length"], "input_length", file, number)
        time = row["timestamp"]
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 1e15:
            raise InputError(f"{file}:{number}: timestamp must be milliseconds from 0 on, got {one_line(time)}")
        answer = _tokens(row["output_length"], "output_length", file, number)
        yield _Row(time / 1000, tokens, answer, _blocks(row.get("hash_ids", []), tokens, file, number))


def _blocks(ids: Any, tokens: int, file: str, number: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**62 for each in ids):
        raise InputError(f"{file}:{number}: hash_ids must be a list of whole numbers from 0 on, got {one_line(ids)}")
    if len(ids) > -(-tokens // MOONCAKE_BLOCK):
        raise InputError(
            f"{file}:{number}: {len(ids)} hash_ids for {tokens} tokens; there is one for each {MOONCAKE_BLOCK}"
        )
    return tuple(ids)


def _tokens(value: Any, name: str, file: str, number: int) -> int:
    """A length; 0 is taken for what it is in the traces, a request that was cut off at once."""
    text = str(value).strip() if type(value) in (int, str) else ""
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= MAX_TOKENS):
        raise InputError(
            f"{file}:{number}: {name} must be a number of tokens in 0..{MAX_TOKENS:,}, got {one_line(value)}"
        )
    return int(text)


_READERS: dict[str, Callable[[TextIO, str], Iterator[_Row]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    LENGTHS: _lengths,
}
FORMATS = tuple(_READERS)
