"""Connections of the HTTP server: how many there may be, and how long each may take to send a header."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvanta.server.http.errors import ApiError, json_bytes

MAX_HEADER_BYTES = 64 * 1024


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with limits; `limited` makes a class with other ones."""

    max_connections = 4096
    header_seconds = 20.0
    _since = 0.0
    """time.monotonic() when the connection had nothing more to do."""
    _timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """True while no request is in progress: the connection waits for a header, or for the rest of one."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        """A new connection takes the place of the one that has been idle longest, if there are too many."""
        super().connection_made(transport)
        self._since = time.monotonic()
        self._wait_for_header()
        if len(self.connections) <= self.max_connections:
            return
        others = [each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self]
        waiting = [each for each in others if each.idle]
        if waiting:
            min(waiting, key=lambda each: each._since).leave()
        else:
            self.leave()

    def data_received(self, data: bytes) -> None:
        """From the first byte of a header on, the rest must come in time."""
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._wait_for_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the timer as well."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Idle from now on."""
        self._since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP with an error of the usual form. An answer that has begun just ends."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            limit = f"or its header has more than {2 * MAX_HEADER_BYTES} bytes"
            body = json_bytes(ApiError(400, f"the request is not valid HTTP, {limit}").body())
            headers = [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def leave(self) -> None:
        """Closes the connection."""
        self.connections.discard(self)  # at once: the transport reports it later
        self.transport.close()

    def _wait_for_header(self) -> None:
        self._timer = self.loop.call_later(self.header_seconds, self.leave)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited(max_connections: int, header_seconds: float) -> type[LimitedProtocol]:
    """A protocol class for uvicorn's `http`."""
    limits = {"max_connections": max_connections, "header_seconds": header_seconds}
    return type("Protocol", (LimitedProtocol,), limits)
