"""The server's limiter: how many requests enter in one turn of the event loop."""

import asyncio
from typing import Any

from kvanta.server.http.admission import PER_ITERATION, AdmissionLimiter


async def turns_of(methods: list[str], cancelled: tuple[int, ...] = ()) -> dict[int, int]:
    """By the number of a request: the turn in which it has entered."""
    loop = asyncio.get_running_loop()
    turn = 0
    counts = True

    def count() -> None:
        nonlocal turn
        turn += 1
        if counts:
            loop.call_soon(count)

    entered: dict[int, int] = {}

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        entered[scope["number"]] = turn

    limiter = AdmissionLimiter(app)
    loop.call_soon(count)

    async def receive() -> Any:
        raise AssertionError

    async def send(_: Any) -> None:
        raise AssertionError

    tasks = [
        asyncio.create_task(limiter({"type": "http", "method": method, "number": number}, receive, send))
        for number, method in enumerate(methods)
    ]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counts = False
    return entered


def test_a_crowd_enters_in_order_a_few_at_a_time() -> None:
    entered = asyncio.run(turns_of(["POST"] * 50))
    assert list(entered) == list(range(50))
    turns = list(entered.values())
    assert max(turns.count(turn) for turn in turns) == PER_ITERATION
    assert turns[-1] - turns[0] <= 50 / PER_ITERATION + 2


def test_what_only_looks_does_not_wait() -> None:
    entered = asyncio.run(turns_of(["POST"] * 50 + ["GET"]))
    assert entered[50] == entered[0]


def test_those_who_leave_keep_nobody_waiting() -> None:
    entered = asyncio.run(turns_of(["POST"] * 50, cancelled=tuple(range(10, 40))))
    assert list(entered) == [*range(10), *range(40, 50)]
    assert entered[49] - entered[0] <= 20 / PER_ITERATION + 2
