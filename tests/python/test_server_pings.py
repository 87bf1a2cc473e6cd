"""Pings of streams that have nothing else to send; the engine's outputs are held back until some have come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import openai
import pytest
from live_server import LiveServer, live_server, wait_until_idle

from kvanta.server.http.idle_timer import IdleTimer
from kvanta.server.jobs.generation_job import GenerationJob

PINGS = 3
CHAT = [{"role": "user", "content": "Lily"}]
COMMENT = ": ping\n\n"
EVENT = 'event: ping\ndata: {"type":"ping"}\n\n'
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "Lily", "max_output_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    "/generate": {"text": "Once", "sampling_params": {"max_new_tokens": 4, "temperature": 0}},
}


class FakeLoop:
    """An event loop whose time stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.scheduled: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, call, (), self)  # type: ignore[arg-type]
        self.scheduled.append((when, call, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.scheduled = [each for each in self.scheduled if each[2] is not handle]

    def get_debug(self) -> bool:
        return False

    def advance(self, seconds: float) -> None:
        """Runs what is due."""
        self.now += seconds
        due = [each for each in self.scheduled if each[0] <= self.now]
        self.scheduled = [each for each in self.scheduled if each[0] > self.now]
        for _, call, _ in due:
            call()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    fake = FakeLoop()
    monkeypatch.setattr("kvanta.server.http.idle_timer.asyncio.get_running_loop", lambda: fake)
    return fake


def test_a_timer_expires_once_nothing_has_happened_for_its_time(loop: FakeLoop) -> None:
    calls: list[float] = []
    with IdleTimer(15, lambda: calls.append(loop.now)) as idle:
        for _ in range(10):  # 40 s with an event every 4 s
            loop.advance(4)
            idle.restart()
        assert (calls, idle.expired) == ([], False)
        loop.advance(14.9)
        assert not idle.expired
        loop.advance(0.1)
        assert (calls, idle.expired) == ([155.0], True)
        loop.advance(15)  # nobody has reacted
        assert calls == [155.0, 170.0]
        idle.restart()
        assert not idle.expired
        assert len(loop.scheduled) == 1
    assert not loop.scheduled


def test_no_time_is_no_timer(loop: FakeLoop) -> None:
    with IdleTimer(0, lambda: pytest.fail("expired")) as idle:
        assert not loop.scheduled
        assert not idle.expired


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(stream_ping_seconds=0.005) as running:
        yield running


@pytest.fixture
def held(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Outputs of the engine are held back until a stream has been idle PINGS times."""
    front = server.front
    outputs: list[Any] = []
    pass_on, nudge = front._pass_on, GenerationJob.nudge
    nudges: list[GenerationJob] = []

    def hold(popped: Sequence[Any]) -> None:
        outputs.extend(popped)
        if len(nudges) > PINGS:
            release()

    def release() -> None:
        pass_on(outputs)
        outputs.clear()

    def counted(job: GenerationJob) -> None:
        nudges.append(job)
        nudge(job)
        if len(nudges) > PINGS:  # the stream has read the nudges before
            release()

    monkeypatch.setattr(front, "_pass_on", hold)
    monkeypatch.setattr(GenerationJob, "nudge", counted)
    return outputs


@pytest.mark.parametrize("path", REQUESTS)
def test_streams_send_pings_while_they_wait(server: LiveServer, held: list[Any], path: str) -> None:
    body = {**REQUESTS[path], "stream": True}
    with server.client.stream("POST", path, json=body) as response:
        text = response.read().decode()
    ping = EVENT if path == "/v1/messages" else COMMENT
    assert text.count(ping) >= PINGS
    data = [line for line in text.replace(ping, "").split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in data if line != "data: [DONE]"]
    assert events
    assert not any(line.startswith(":") for line in text.replace(ping, "").split("\n"))
    assert not held
    wait_until_idle(server)


def test_openais_client_ignores_pings(server: LiveServer, held: list[Any]) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    chunks = list(client.completions.create(model="tiny", prompt="Once", max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert not held


def test_anthropics_client_ignores_pings(server: LiveServer, held: list[Any]) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
    with client.messages.stream(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=4) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"
    assert not held


@pytest.mark.parametrize("path", REQUESTS)
def test_a_client_may_leave_between_pings(server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Its request ends, although no output of the engine reaches the stream any more."""
    monkeypatch.setattr(server.front, "_pass_on", lambda _: None)
    with server.client.stream("POST", path, json={**REQUESTS[path], "stream": True}) as response:
        ping = EVENT if path == "/v1/messages" else COMMENT
        seen = ""
        for text in response.iter_text():
            seen += text
            if ping in seen:
                break
    wait_until_idle(server)
    assert server.on_loop(lambda: server.front.open_requests) == 0


def test_no_pings_without_their_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def nudge(_: GenerationJob) -> None:
        pytest.fail("a ping")

    monkeypatch.setattr(GenerationJob, "nudge", nudge)
    with (
        live_server(stream_ping_seconds=0) as server,
        server.client.stream(
            "POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
        ) as response,
    ):
        assert ": ping" not in response.read().decode()
