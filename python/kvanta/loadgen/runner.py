"""Sends a workload's requests when they are due, with at most so many on their way."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from kvanta.loadgen.records import LoadError, RequestRecord
from kvanta.loadgen.workload import PlannedRequest, Workload

Clock = Callable[[], float]
"""Seconds since the start of the run."""
Send = Callable[[PlannedRequest, RequestRecord, Clock], Awaitable[None]]
"""Sends one request and fills in its record: news_s, output_tokens and what the server counts. Raises LoadError."""


async def run_load(
    workload: Workload, send: Send, *, concurrency: int | None = None, finished: Callable[[], object] = lambda: None
) -> tuple[list[RequestRecord], float]:
    """The records in the order of the requests, and the seconds until the last answer ended.

    `concurrency`: the most requests that are on their way; those beyond wait, first come first served. `finished` is
    called once per request.
    """
    begin = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begin

    places = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

    async def one(request: PlannedRequest, record: RequestRecord) -> None:
        record.ready_s = clock()
        async with places:
            record.sent_s = clock()
            try:
                await send(request, record, clock)
            except LoadError as error:
                record.error = error
            record.done_s = clock()
        finished()

    records = [
        RequestRecord(each.index, each.arrival_s, each.input_tokens, each.output_tokens) for each in workload.requests
    ]
    async with asyncio.TaskGroup() as tasks:
        for request, record in zip(workload.requests, records, strict=True):
            wait = request.arrival_s - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.create_task(one(request, record))
    return records, clock()
