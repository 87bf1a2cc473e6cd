"""Requests whose clients leave, or that fail, at any moment: nothing of them goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer, leave_when_computing, live_server, wait_until_idle

from kvanta import SamplingParams
from kvanta.engine.generation import Generation
from kvanta.server.http.errors import ApiError
from kvanta.text.prompts import TokenPrompt

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server() as running:
        yield running


def test_a_client_that_leaves_before_a_whole_answer(server: LiveServer) -> None:
    body = {"prompt": PROMPT, "n": 200, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    assert leave_when_computing(server, "/v1/completions", "generated_tokens", **body) < 200 * 400
    assert server.on_loop(lambda: server.front.metrics.responses["/v1/completions", "499"]) == 1


def test_a_client_that_leaves_while_its_next_event_is_not_due(server: LiveServer) -> None:
    """Its request ends, too: a server that shuts down waits for all of them."""

    async def leave() -> int:
        front = server.front
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stream_interval=1000)
        prompt = TokenPrompt(PROMPT, front.tokenizer.encode(PROMPT))
        job = await front.submit(lambda: [prompt], params, lambda: None, arrival=time.perf_counter(), at_once=True)
        seen = 0
        async for deltas in job.deltas():
            seen += len(deltas)
            while len(job.outputs[0].token_ids) <= deltas[0].end:
                await asyncio.sleep(0)
            job.cancel()
        return seen

    asyncio.run_coroutine_threadsafe(leave(), server.loop).result(30)
    wait_until_idle(server)


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_ends_while_it_is_added(server: LiveServer, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool) -> None:
    """By an error, or because its client leaves: the engine goes on with none of its texts."""
    adding, released = threading.Event(), threading.Event()

    def add_late(self: Generation, *arguments: Any) -> None:
        adding.set()
        assert released.wait(60)
        add_to(self, *arguments)

    add_to = Generation.add_to
    monkeypatch.setattr(Generation, "add_to", add_late)

    async def end() -> None:
        front = server.front
        params = SamplingParams(temperature=0.0, n=200, max_tokens=400, ignore_eos=True)
        prompt = TokenPrompt(PROMPT, front.tokenizer.encode(PROMPT))
        submitting = asyncio.create_task(
            front.submit(lambda: [prompt], params, lambda: None, arrival=time.perf_counter())
        )
        while not adding.is_set():
            await asyncio.sleep(0)
        if cancelled:
            submitting.cancel()
            await asyncio.wait([submitting])
        else:
            next(iter(front._jobs.values())).fail(ApiError(504, "too late"))
        released.set()
        if not cancelled:
            with pytest.raises(ApiError):
                await (await submitting).finish()
        both_free = threading.Barrier(2)  # of the threads, one of which has added the texts
        await asyncio.gather(*(front.off_loop(both_free.wait) for _ in range(2)))

    before = server.front.loaded.stats()["generated_tokens"]
    try:
        asyncio.run_coroutine_threadsafe(end(), server.loop).result(60)
    finally:
        released.set()
    wait_until_idle(server)
    assert server.front.loaded.stats()["generated_tokens"] - before < 200 * 400
