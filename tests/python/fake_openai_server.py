"""A small OpenAI-like server on asyncio, whose answers a test chooses: whole, failing, cut off, silent, or nonsense."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

VOCABULARY = 1000
HEAD = b"HTTP/1.1 %d X\r\nContent-Type: %b\r\nConnection: close\r\n\r\n"
STREAM = HEAD % (200, b"text/event-stream; charset=utf-8")
SILENCE = object()
"""Yielded by an answer: nothing comes any more until the client goes away."""

GenerationResponse = Callable[[dict[str, Any]], AsyncIterator[Any]]


def event(data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return f"data: {text}\n\n".encode()


def error(status: int, message: str) -> bytes:
    return HEAD % (status, b"application/json") + json.dumps({"error": {"message": message}}).encode()


def usage_of(body: dict[str, Any], produced: int, cached: int = 0) -> dict[str, Any]:
    prompt = body.get("prompt")
    if prompt is None:  # a chat: 5 tokens of a template around it
        count = 5 + 2 * len(body["messages"][0]["content"].split())
    else:
        count = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())  # two tokens a word
    return {"prompt_tokens": count, "completion_tokens": produced, "prompt_tokens_details": {"cached_tokens": cached}}


async def whole_answer(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """The requested number of tokens, one a chunk, then the usage."""
    yield STREAM
    chat = "messages" in body
    if chat:
        yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    for number in range(body["max_tokens"]):
        last = "length" if number + 1 == body["max_tokens"] else None
        says = {"delta": {"content": " x"}} if chat else {"text": " x"}
        yield event({"choices": [{"index": 0, **says, "finish_reason": last}]})
    if body.get("stream_options", {}).get("include_usage"):
        yield event({"choices": [], "usage": usage_of(body, body["max_tokens"], cached=3)})
    yield event("[DONE]")


@dataclass
class FakeServer:
    """Serves in a separate thread while it is entered. `answers`: by the number of the completion, counted from 0
    after the probes (requests for 2 tokens); `answer` for all others.
    """

    answer: GenerationResponse = whole_answer
    answers: dict[int, GenerationResponse] = field(default_factory=dict)
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake", "max_model_len": 4096}]})
    with_tokenize: bool = True
    metrics: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of completion requests, without the probes."""
    headers: list[str] = field(default_factory=list)
    """Headers of every request."""
    most_at_once: int = 0
    _now: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()

        def serve() -> None:
            asyncio.set_event_loop(self._loop)
            self._server = self._loop.run_until_complete(asyncio.start_server(self._talk, "127.0.0.1", 0))
            self._port = self._server.sockets[0].getsockname()[1]
            ready.set()
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        async def stop() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            fields = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
            body = json.loads(await reader.readexactly(int(fields.get("content-length", 0))) or b"{}")
            await self._reply(head.split()[1], body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _reply(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            writer.write(HEAD % (200, b"application/json") + json.dumps(self.models).encode())
        elif path == "/metrics" and self.metrics:
            writer.write(HEAD % (200, b"text/plain") + self.metrics.encode())
        elif path == "/tokenize" and self.with_tokenize:
            ids = [sum(map(ord, word)) % VOCABULARY for word in body["prompt"].split()]
            writer.write(HEAD % (200, b"application/json") + json.dumps({"tokens": ids}).encode())
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(body, reader, writer)
        else:
            writer.write(error(404, "not found"))
        await writer.drain()

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = self.answer
        if body["max_tokens"] != 2:
            answer = self.answers.get(len(self.bodies), self.answer)
            self.bodies.append(body)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            async for part in answer(body):
                if part is SILENCE:
                    await reader.read()  # until the client closes its end
                    return
                writer.write(part)
                await writer.drain()
        finally:
            self._now -= 1
