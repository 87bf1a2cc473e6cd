"""Situations of several users of one server, each with the figures that a user of it feels (many_users.py)."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import aiohttp

from kvanta.loadgen.records import LoadError, RequestRecord
from kvanta.loadgen.summary import distribution
from kvanta.loadgen.target import Target
from kvanta.loadgen.workload import PlannedRequest

_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, and numbers of users."""

    prompt: int = 8192
    """The long prompt."""
    streams: int = 4
    stream_prompt: int = 64
    stream_tokens: int = 4000
    """Tokens of an answer, which is given up when the scene is over."""
    before: int = 40
    """Tokens of each stream before the prompt arrives, and again after its first token."""
    short: int = 40
    answer: int = 16
    """Tokens of an answer to a short prompt."""
    delay_s: float = 1.0
    """Seconds from the long prompt, or the many waiting ones, to the one that is measured."""
    per_minute: float = 200.0
    minutes: float = 10.0
    waiting: int = 50
    waiting_prompt: int = 512


@dataclass
class User:
    """Somebody who sends requests to the server, each with a prompt that no cache has."""

    session: aiohttp.ClientSession
    target: Target
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of prompts."""
    seed: int = field(default_factory=lambda: secrets.randbits(62))

    def named(self, name: str, session: aiohttp.ClientSession | None = None) -> User:
        """Another user, who is told apart by the field `user`, and by the key of a separate session."""
        target = replace(self.target, extra={**self.target.extra, "user": name})
        return replace(self, target=target, session=session or self.session)

    def begin(self, tokens: int, answer: int) -> tuple[RequestRecord, asyncio.Task[None]]:
        """Sends a prompt; the record is filled in meanwhile."""
        number = next(self.numbers)
        prompt = self.target.prompt(self.target.maker(self.seed), PlannedRequest(number, 0.0, tokens, answer), 0)
        record = RequestRecord(number, 0.0, tokens, answer, sent_s=time.perf_counter())

        async def send() -> None:
            try:
                await self.target.send(self.session, prompt, record, time.perf_counter)
            except LoadError as error:
                record.error = error
            record.done_s = time.perf_counter()

        return record, asyncio.create_task(send())

    async def ask(self, tokens: int, answer: int) -> RequestRecord:
        """The whole answer. Raises SystemExit if there is none."""
        record, task = self.begin(tokens, answer)
        await task
        return answered(record)


def answered(record: RequestRecord) -> RequestRecord:
    """The same record. Raises SystemExit if the request has failed."""
    if not record.succeeded:
        error = record.error or LoadError("bad_response", "the answer has no token")
        raise SystemExit(f"error: a prompt of {record.input_tokens} tokens: {error.kind}: {error.detail}")
    return record


async def stalls(user: User, shape: Shape) -> dict[str, Any]:
    """Gaps of streams while a long prompt is computed."""
    alone = await user.ask(shape.prompt, 2)
    streams = [user.begin(shape.stream_prompt, shape.stream_tokens) for _ in range(shape.streams)]

    async def grown(moments: Sequence[int]) -> None:
        while any(
            _moments(record) < wanted and not task.done()
            for (record, task), wanted in zip(streams, moments, strict=True)
        ):
            await asyncio.sleep(_LOOK_SECONDS)

    try:
        await grown([shape.before + 1] * shape.streams)
        prompt = await user.ask(shape.prompt, 2)
        await grown([_moments(record) + shape.before for record, _ in streams])
    finally:
        for _, task in streams:
            task.cancel()
        await asyncio.gather(*(task for _, task in streams), return_exceptions=True)
    for record, _ in streams:
        if record.error is not None or not record.news_s:
            answered(record)
    return stall_figures(
        [_since(record, shape.before, prompt.sent_s) for record, _ in streams],
        prompt.sent_s,
        prompt.news_s[0],
        alone.ttft_s,
        prompt.input_tokens,
    )


def _moments(record: RequestRecord) -> int:
    """Number of moments at which chunks were read: a busy machine reads several at one."""
    return len(set(record.news_s))


def _since(record: RequestRecord, count: int, sent: float) -> list[float]:
    """Moments of the record's chunks, from `count` gaps before `sent` on, when all streams' prompts were computed."""
    early = sorted({moment for moment in record.news_s if moment <= sent})
    return [*early[-count - 1 :], *(moment for moment in record.news_s if moment > sent)]


def stall_figures(
    streams: Sequence[Sequence[float]], sent: float, first: float, alone_s: float, prompt_tokens: int
) -> dict[str, Any]:
    """`streams`: moments of each one's chunks. The prompt was sent at `sent`, and `first` is its first token's time.

    Chunks that were read at one moment have no gap between them: that would be a figure of this process.
    """
    gaps = [list(itertools.pairwise(sorted(set(news)))) for news in streams]
    before = [end - begin for each in gaps for begin, end in each if end <= sent]
    during = [end - begin for each in gaps for begin, end in each if end > sent and begin < first]
    if not before or not during:
        raise SystemExit("error: the streams ended before the prompt was computed; see --stream-tokens")
    usual, largest = median(before), max(during)
    tokens = [sum(sent < moment <= first for moment in news) for news in streams]
    own = first - sent - max(tokens) * usual
    return {
        "median_before_ms": 1000 * usual,
        "largest_before_ms": 1000 * max(before),
        "during_ms": distribution(during),
        "largest_ms": 1000 * largest,
        "largest_times_median": largest / usual,
        "prompt_s": first - sent,
        "alone_s": alone_s,
        "times_alone": (first - sent) / alone_s,
        "times_alone_without_streams": own / alone_s,
        "stream_tokens": sum(tokens),
        "tokens_per_s": (prompt_tokens + sum(tokens)) / (first - sent),
        "gaps": [[[round(end - sent, 4), round(1000 * (end - begin), 2)] for begin, end in each] for each in gaps],
    }


async def short(user: User, shape: Shape) -> dict[str, Any]:
    """A short prompt that arrives after a long one."""
    short_alone, long_alone = await user.ask(shape.short, shape.answer), await user.ask(shape.prompt, 2)
    long, task = user.begin(shape.prompt, 2)
    await asyncio.sleep(shape.delay_s)
    one = await user.ask(shape.short, shape.answer)
    await task
    return {
        **_beside_alone("short", one, short_alone),
        **_beside_alone("long", answered(long), long_alone),
    }


async def many(user: User, shape: Shape) -> dict[str, Any]:
    """Short prompts at a steady rate, and a long one that must not starve."""
    short_alone, long_alone = await user.ask(shape.short, shape.answer), await user.ask(shape.prompt, 2)
    begin, interval = time.perf_counter(), 60 / shape.per_minute
    shorts = [user.begin(shape.short, shape.answer)]
    long, task = user.begin(shape.prompt, 2)
    while not long.news_s and not task.done() and len(shorts) < shape.per_minute * shape.minutes:
        await asyncio.sleep(max(0.0, begin + len(shorts) * interval - time.perf_counter()))
        shorts.append(user.begin(shape.short, shape.answer))
    starved = not long.news_s and not task.done()
    if starved:
        task.cancel()
    await asyncio.gather(task, *(each for _, each in shorts), return_exceptions=True)
    records = [record for record, _ in shorts if record.succeeded]
    figures: dict[str, float | None] = {"long_s": None, "long_alone_s": long_alone.ttft_s, "long_times_alone": None}
    if not starved:
        figures = _beside_alone("long", answered(long), long_alone)
    return {
        "seconds": time.perf_counter() - begin,
        "starved": starved,
        **figures,
        "shorts": len(shorts),
        "shorts_failed": len(shorts) - len(records),
        "short_alone_s": short_alone.ttft_s,
        "short_ms": distribution([record.ttft_s for record in records]),
    }


async def users(user: User, shape: Shape, other: User | None = None) -> dict[str, Any]:
    """A user with one prompt, after another one's many. `other`: for the one prompt; else told apart by `user`."""
    one, crowd = other or user.named("b"), user.named("a")
    alone = await one.ask(shape.waiting_prompt, shape.answer)
    waiting = [crowd.begin(shape.waiting_prompt, shape.answer) for _ in range(shape.waiting)]
    await asyncio.sleep(shape.delay_s)
    measured = await one.ask(shape.waiting_prompt, shape.answer)
    await asyncio.gather(*(task for _, task in waiting))
    records = [answered(record) for record, _ in waiting]
    return {
        **_beside_alone("one", measured, alone),
        "served_before_it": sum(record.news_s[0] < measured.news_s[0] for record in records),
        "waiting_ms": distribution([record.ttft_s for record in records]),
    }


def _beside_alone(name: str, record: RequestRecord, alone: RequestRecord) -> dict[str, float | None]:
    """Times to the first token."""
    return {
        f"{name}_s": record.ttft_s,
        f"{name}_alone_s": alone.ttft_s,
        f"{name}_times_alone": record.ttft_s / alone.ttft_s,
    }


Scene = Callable[[User, Shape], Awaitable[dict[str, Any]]]
SCENES: Mapping[str, Scene] = {"stalls": stalls, "short": short, "many": many, "users": users}


def median_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over repeated runs, also of parts of a distribution; true if once true; else the middle run's value."""
    ordered = sorted(runs, key=lambda run: float(run.get("largest_ms") or next(_numbers(run))))
    middle = ordered[len(ordered) // 2]
    merged: dict[str, Any] = {}
    for name, value in middle.items():
        values = [run[name] for run in runs]
        if all(isinstance(each, Mapping) for each in values):
            merged[name] = {key: median(each[key] for each in values) for key in value}
        elif isinstance(value, bool):
            merged[name] = any(values)
        elif all(isinstance(each, (int, float)) for each in values):
            merged[name] = median(values)
        else:
            merged[name] = value
    return merged


def _numbers(run: Mapping[str, Any]) -> Iterator[float]:
    return (value for value in run.values() if isinstance(value, (int, float)) and not isinstance(value, bool))
