"""ASGI middleware: request ids and the access log; API keys and limits of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import random
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvanta.server.http.connections import MAX_HEADER_BYTES
from kvanta.server.http.errors import ApiError, error_response
from kvanta.server.http.hints import HEADER
from kvanta.server.http.hints import begin as begin_hints
from kvanta.server.http.hosts import AllowedHosts

_log = logging.getLogger("kvanta.server")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Names of codings -> zlib's window bits.
_DEFLATE = 15
_INFLATED: Mapping[str, int] = {"gzip": 31, "x-gzip": 31, "deflate": _DEFLATE}
_SLASHES = re.compile(r"/{2,}")
# Paths of llama.cpp that mean the same as ours.
_OTHER_PATHS: Mapping[str, str] = {
    "/chat/completions": "/v1/chat/completions",
    "/models": "/v1/models",
    "/reranking": "/rerank",
    "/v1/reranking": "/rerank",
}
_AZURE_PATH = re.compile(r"^/openai/(?:(?:deployments/[^/]+|v1)/)?")
_BODY_SECONDS = 60.0
"""Longest time without a byte of a body; the whole body may take this and a second for each _BODY_RATE bytes."""
_BODY_RATE = 16 * 1024
OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/ping", "/version", "/metrics"})
OPEN_PREFIX = "/page/"


def route_path(scope: Scope) -> str:
    """The path that routes are compared with: without the prefix at which a proxy serves this server (`--root-path`).

    As Starlette has it, so that routes and the check of keys never see different paths.
    """
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    return rest if prefix and path.startswith(prefix) and rest[:1] in ("", "/") else path


def _normalize_path(scope: Scope) -> None:
    """Takes double slashes away, which a base URL that ends in one makes, and reads Azure's paths as OpenAI's."""
    path, prefix = scope["path"], scope.get("root_path", "")
    prefix = prefix if prefix and path.startswith(prefix) else ""
    rest = path.removeprefix(prefix)
    if "//" in rest or rest.startswith("/openai/"):
        rest = _AZURE_PATH.sub("/v1/", _SLASHES.sub("/", rest))
        scope["path"] = prefix + rest
    if rest in _OTHER_PATHS:
        scope["path"] = prefix + _OTHER_PATHS[rest]


def refuse_web_pages(http: Request) -> None:
    """Refuses requests that have an effect and that a browser sends for any page without asking the server.

    Raises ApiError.
    """
    site = http.headers.get("sec-fetch-site", "none")
    if "origin" in http.headers or site not in ("none", "same-origin"):
        raise ApiError(403, "not for web pages")


class RequestLog:
    """Outermost middleware: gives each request an id and logs one line for it, and the traceback of an internal error.

    `answered(scope, status)` is called for every answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        answered: Callable[[Scope, int], None],
        *,
        log_requests: bool,
        unlogged_paths: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._answered = answered
        self._log_requests = log_requests
        self._unlogged = tuple(path.rstrip("/") + "/" for path in unlogged_paths)
        self._ids = random.Random()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        unique = f"{self._ids.getrandbits(128):032x}"  # no secret, and a call of the system less
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = unique
        begin = time.perf_counter()
        ignored = begin_hints()
        _normalize_path(scope)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        # Clients may send the same id twice, and answers have different ones.
        state["answer_id"] = unique if request_id == unique else f"{request_id}-{unique[:8]}"
        state["arrival"] = begin
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if ignored:
                    headers[HEADER] = ", ".join(ignored)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            _log.exception("internal error, request %s", request_id)  # the application has answered with 500
        finally:
            self._answered(scope, status)
            if self._log_requests and not (route_path(scope) + "/").startswith(self._unlogged):
                self._log_line(scope, status, time.perf_counter() - begin)

    def _log_line(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        host, port = scope.get("client") or ("-", 0)
        path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:200]
        _log.info(
            '%s:%s "%s %s" %d %.1f ms%s id=%s',
            host,
            port,
            scope["method"],
            path,
            status,
            seconds * 1e3,
            tokens_note(state),
            state["request_id"],
        )


def tokens_note(state: dict[str, Any]) -> str:
    """Token counts of a request, for the log."""
    answer = state.get("answer")
    if answer is None:
        return ""
    usage = answer.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f", prompt {usage['prompt_tokens']} (cached {cached}), new {usage['completion_tokens']}"


class AccessControl:
    """Refuses requests without a key (401), under a foreign name (403), with a header that is too large (431), and
    bodies that are too large (413), compressed in other ways than gzip and deflate (415) or arrive too slowly (408).
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: Sequence[str],
        max_body_bytes: int,
        hosts: AllowedHosts | None = None,
        *,
        max_headers: int = 256,
    ) -> None:
        """`hosts`: None for every name."""
        self._app = app
        self._hosts = hosts
        self._digests = [_digest(key.encode()) for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._max_headers = max_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = route_path(scope)
        try:
            self._check_header(scope, headers)
            self._check_key(path, headers, scope)
            self._check_encoding(headers)
            self._check_length(headers)
        except ApiError as error:
            await error_response(error, path)(scope, receive, send)
            return
        body = self._limited(receive)
        bits = _INFLATED.get(headers.get("content-encoding", "").lower())
        await self._app(scope, body if bits is None else self._inflated(body, bits), send)

    def _check_header(self, scope: Scope, headers: Headers) -> None:
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in headers.raw)
        if size > MAX_HEADER_BYTES:
            raise ApiError(431, f"the header has {size} bytes; at most {MAX_HEADER_BYTES} are read")
        if len(headers.raw) > self._max_headers:
            message = f"the request has {len(headers.raw)} headers; at most {self._max_headers} are read"
            raise ApiError(431, f"{message} (--h11-max-header-count)")
        host = headers.get("host", "")
        if self._hosts is not None and not self._hosts.allows(host):
            raise ApiError(
                403,
                f"the server does not answer under the name {host[:100]!r}; its operator can allow it: --allowed-hosts",
                code="host_not_allowed",
            )

    def _check_key(self, path: str, headers: Headers, scope: Scope) -> None:
        if not self._digests or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key") or headers.get("api-key", "")
        given = _digest(sent.encode("latin-1"))  # the bytes as they came
        # Every key is compared, each in constant time.
        if sum([hmac.compare_digest(given, digest) for digest in self._digests]) == 0:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope.setdefault("state", {})["api_key"] = given.hex()

    def _check_encoding(self, headers: Headers) -> None:
        coding = headers.get("content-encoding", "").lower()
        if coding not in ("", "identity", *_INFLATED):
            message = f"the body has the Content-Encoding {coding[:50]!r}; supported: identity, {', '.join(_INFLATED)}"
            raise ApiError(415, message, headers={"Accept-Encoding": ", ".join(("identity", *_INFLATED))})

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body_bytes):
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body_bytes} bytes (--max-body-bytes)")

    def _limited(self, receive: Receive) -> Receive:
        received = 0
        complete = False
        begin: float | None = None

        async def limited() -> Message:
            nonlocal received, complete, begin
            if complete:  # what comes now is the client's leaving
                return await receive()
            now = asyncio.get_running_loop().time()
            begin = now if begin is None else begin
            try:
                async with asyncio.timeout_at(_BODY_SECONDS + min(now, begin + received / _BODY_RATE)):
                    message = await receive()
            except TimeoutError:
                seconds = asyncio.get_running_loop().time() - begin
                text = f"the body came too slowly: {received} bytes in {seconds:.0f} s"
                raise ApiError(408, text, headers={"Connection": "close"}) from None
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if received > self._max_body_bytes:
                    raise self._too_large()
            return message

        return limited

    def _inflated(self, receive: Receive, bits: int) -> Receive:
        """The body without its compression, of which no more is made than the limit. `bits`: of zlib."""
        inflater = zlib.decompressobj(bits)
        size = 0
        began = False

        async def inflated() -> Message:
            nonlocal inflater, size, began
            message = await receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            if data and not began:
                began = True
                if bits == _DEFLATE and data[0] & 15 != zlib.DEFLATED:  # without zlib's header, as many clients send it
                    inflater = zlib.decompressobj(-_DEFLATE)
            try:
                body = inflater.decompress(data, self._max_body_bytes + 1 - size)
            except zlib.error as error:
                raise ApiError(400, f"the body is not compressed as its Content-Encoding says: {error}") from None
            size += len(body)
            if size > self._max_body_bytes:
                raise self._too_large()
            if inflater.unused_data:
                raise ApiError(400, f"{len(inflater.unused_data)} bytes follow the end of the compressed body")
            if not message.get("more_body", False) and began and not inflater.eof:
                raise ApiError(400, "the compressed body ends too early")
            return {**message, "body": body}

        return inflated


class HeadRequests:
    """Answers HEAD as GET, which FastAPI's routes do not: `wget --spider` and monitors check /health so.

    The HTTP server leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        is_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await self._app({**scope, "method": "GET"} if is_head else scope, receive, send)


def _digest(key: bytes) -> bytes:
    """A digest; its length does not depend on the key."""
    return hashlib.sha256(key).digest()
