"""One request to an OpenAI-compatible server over HTTP, its answer read as a stream."""

from __future__ import annotations

import json
import resource
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from kvanta.loadgen.records import LoadError, RequestRecord
from kvanta.loadgen.runner import Clock
from kvanta.loadgen.sse import EventReader

_ERROR_BODY = 4096
_READ = 1 << 16


@asynccontextmanager
async def open_session(timeout_s: float, api_key: str | None) -> AsyncIterator[aiohttp.ClientSession]:
    """A session with as many connections as requests are on their way, which this process is then allowed to have.

    `timeout_s`: of one request as a whole.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= usual < most:  # one file per connection: the usual 1,024 are soon used up
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
        trust_env=True,
    ) as session:
        yield session


async def stream_answer(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], record: RequestRecord, clock: Clock
) -> None:
    """Posts `body` and fills in `record` from the stream. Raises LoadError."""
    async with _answer(session, "POST", url, body) as response:
        kind = response.headers.get("Content-Type", "no type")
        if not kind.startswith("text/event-stream"):
            raise LoadError("bad_response", f"not an event stream but {kind}: {await _beginning(response)}")
        reader, answer = EventReader(), _Answer(record)
        while received := await response.content.read(_READ):
            now = clock()
            try:
                for data in reader.feed(received):
                    answer.take(data, now)
            except ValueError as error:
                raise LoadError("bad_response", str(error)) from None
        answer.end()


async def fetch_json(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None = None
) -> Any:
    """The server's JSON answer. Raises LoadError."""
    text = await fetch_text(session, method, url, body)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise LoadError("bad_response", f"not JSON: {text[:200]!r}") from None


async def fetch_text(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    max_bytes: int = 1 << 24,
) -> str:
    """The server's answer. Raises LoadError, also if it is more than `max_bytes`."""
    async with _answer(session, method, url, body) as response:
        received = bytearray()
        while part := await response.content.read(_READ):
            received += part
            if len(received) > max_bytes:
                raise LoadError("bad_response", f"{url} answers with more than {max_bytes:,} bytes")
        return received.decode("utf-8", errors="replace")


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    try:
        async with session.request(method, url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                raise LoadError(f"http_{response.status}", await _beginning(response) or response.reason or "no body")
            yield response
    except TimeoutError:  # aiohttp's are, and its failed connections are not
        raise LoadError("timeout", f"no whole answer within {session.timeout.total:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise LoadError("connect", str(error)) from None
    except aiohttp.ClientPayloadError as error:
        raise LoadError("disconnected", f"the connection was closed inside the answer: {error}") from None
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError) as error:
        raise LoadError("disconnected", str(error) or "the connection was closed before an answer") from None
    except aiohttp.ClientError as error:
        raise LoadError("bad_response", f"{type(error).__name__}: {error}") from None


async def _beginning(response: aiohttp.ClientResponse) -> str:
    """The message of an error in OpenAI's shape, or what else the body begins with."""
    text = (await response.content.read(_ERROR_BODY)).decode("utf-8", errors="replace")
    try:
        return message_of(json.loads(text)) or text
    except (ValueError, RecursionError):
        return text


def message_of(answer: Any) -> str | None:
    """Message of {"error": {"message": ...}}, {"error": "..."} or {"object": "error", "message": ...}; else None."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error")
    if error is None:
        return str(answer.get("message")) if answer.get("object") == "error" else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class _Answer:
    """The chunks of one stream, put into a record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._finished = False
        self._counted = False  # by the server

    def take(self, data: str, now: float) -> None:
        """Raises LoadError."""
        if data == "[DONE]":
            self._finished = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise LoadError("bad_response", f"a chunk is not JSON: {data[:200]!r}") from None
        message = message_of(chunk)
        if message is not None:
            raise LoadError("server_error", message)
        if not isinstance(chunk, dict):
            raise LoadError("bad_response", f"a chunk is not an object: {data[:200]!r}")
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._take_choice(choice, now)
        if isinstance(chunk.get("usage"), dict):
            self._take_usage(chunk["usage"])

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        self._finished |= choice.get("finish_reason") is not None
        delta = choice.get("delta")
        if isinstance(delta, dict):  # of a chat, whose first chunk may tell the role alone
            fresh = any(delta.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls"))
        else:  # the text may be empty while a character is incomplete; the last chunk may bring no token
            fresh = bool(choice.get("text")) or choice.get("finish_reason") is None
        if fresh:
            self._record.news_s.append(now)
            if not self._counted:
                ids = choice.get("token_ids")
                self._record.output_tokens += len(ids) if isinstance(ids, list) and ids else 1

    def _take_usage(self, usage: dict[str, Any]) -> None:
        counts = [usage.get("completion_tokens"), usage.get("prompt_tokens")]
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        produced, prompt = (each if type(each) is int and each >= 0 else None for each in counts)
        if produced is not None:
            self._record.output_tokens, self._counted = produced, True
        if prompt is not None:
            self._record.input_tokens = prompt
        if type(cached) is int:
            self._record.cached_tokens = cached

    def end(self) -> None:
        """Raises LoadError if the stream has ended too soon."""
        if not self._finished:
            raise LoadError("disconnected", "the stream ended without a finish_reason or [DONE]")
