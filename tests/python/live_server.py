"""A server in this process: its engine can be looked at, its clients are real ones."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import uvicorn

from kvanta.engine.loaded_model import LoadedModel
from kvanta.server.app import make_app
from kvanta.server.http.connections import MAX_HEADER_BYTES
from kvanta.server.jobs.async_llm import AsyncLLM
from kvanta.server.jobs.service import Service

Result = TypeVar("Result")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass
class LiveServer:
    """A running server, as tests see it."""

    url: str
    client: httpx2.Client
    service: Service
    loop: asyncio.AbstractEventLoop

    @property
    def front(self) -> AsyncLLM:
        return self.service.front

    def on_loop(self, function: Callable[[], Result]) -> Result:
        """Calls it on the server's own thread."""

        async def call() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(60)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.client.post(path, json=body)

    def completion(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The body of a refusal, which is OpenAI's."""
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@contextmanager
def live_server(
    *,
    model: str = "stories260k",
    options: dict[str, Any] | None = None,
    cors: dict[str, Any] | None = None,
    kv_cache_dtype: str = "auto",
    quality_sample_rate: float = 0.0,
    protocol: Any = "h11",
    root_path: str = "",
    **settings: Any,
) -> Iterator[LiveServer]:
    """A model with a chat template, on a free port. `options`: further ones of LLM; `settings`: fields of Service."""
    sizes: dict[str, Any] = {
        "kv_cache_memory_bytes": "16MiB",
        "threads": 1,
        "max_num_seqs": 8,
        "max_queued_requests": 256,
    }
    sizes["quality_sample_rate"] = quality_sample_rate
    arguments = {"kv_cache_dtype": kv_cache_dtype, **sizes, **(options or {})}
    loaded = LoadedModel(model, arguments)
    loaded.tokenizer.use_chat_template(CHAT_TEMPLATE)
    service = Service(AsyncLLM(loaded), ["stories260k", "tiny"], **{"log_requests": False, **settings})
    config = uvicorn.Config(
        make_app(service, cors=cors),
        port=0,
        http=protocol,
        root_path=root_path,
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    started = threading.Event()
    place: dict[str, Any] = {}

    async def serve() -> None:
        service.front.start()
        place["loop"] = asyncio.get_running_loop()
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        place["port"] = server.servers[0].sockets[0].getsockname()[1]
        started.set()
        await running
        await service.front.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        url = f"http://127.0.0.1:{place['port']}"
        with httpx2.Client(base_url=url, timeout=120) as client:
            yield LiveServer(url, client, service, place["loop"])
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def events(response: httpx2.Response) -> Iterator[str]:
    """The data of server-sent events."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def wait_until_idle(server: LiveServer) -> None:
    """Waits until the server is idle; checks that every page is free or a prefix's."""
    patience = threading.Event()
    for _ in range(600):
        stats = server.front.loaded.stats()
        if stats["running"] == stats["waiting"] == 0 and server.on_loop(lambda: server.front.admitted) == 0:
            break
        patience.wait(0.1)
    stats = server.front.loaded.stats()
    assert stats["running"] == stats["waiting"] == 0
    assert stats["pages_used"] == stats["prefix_pages"]
    assert server.on_loop(lambda: server.front.admitted) == 0


def leave_when_computing(server: LiveServer, path: str, counter: str, **body: Any) -> int:
    """Posts a body, leaves once `counter` of the statistics grows, waits until idle; returns by how much it grew."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    before = server.front.loaded.stats()[counter]
    with socket.create_connection((server.client.base_url.host, server.client.base_url.port or 0)) as connection:
        connection.sendall(head.encode() + data)
        patience = threading.Event()
        while server.front.loaded.stats()[counter] == before:
            patience.wait(0.005)
    wait_until_idle(server)
    return int(server.front.loaded.stats()[counter] - before)
