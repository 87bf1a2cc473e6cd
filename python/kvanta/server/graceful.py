"""uvicorn with our limits, which lets running requests finish after a signal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from kvanta.server.http.connections import MAX_HEADER_BYTES, limited
from kvanta.server.options import ServerOptions

_log = logging.getLogger("kvanta.server")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AFTER_ABORT = 5.0  # seconds for the last answers to reach their clients
# uvloop accepts one new connection per listener and iteration of the event loop, which may take 20 ms under load.
_LISTENERS = 16
_OTHER_FILES = 64  # files that the process may have open in addition to connections


class Work(Protocol):
    """The requests of a server."""

    draining: bool
    """No further ones are taken."""

    @property
    def admitted(self) -> int:
        """Number of requests that have not ended."""

    def abort_all(self) -> None:
        """Ends them with an error."""


class GracefulServer(uvicorn.Server):
    """The first signal lets running requests finish, up to a limit; the second ends them."""

    def __init__(self, config: uvicorn.Config, work: Work, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._work = work
        self._shutdown_timeout = shutdown_timeout

    async def serve_until_signal(self, listener: socket.socket) -> None:
        """Answers the connections of a socket that listens."""
        await self.serve(sockets=[listener, *(listener.dup() for _ in range(_LISTENERS - 1))])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's, which raises the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.signalled)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def signalled(self) -> None:
        """Begins the end, or makes it come at once."""
        if not self._work.draining:
            running = self._work.admitted
            if running:
                limit = self._shutdown_timeout
                _log.info("finishing %d sequences, at most %g s; another signal ends them", running, limit)
            self._work.draining = True
            self._drain = asyncio.create_task(self._exit_when_idle())
            asyncio.get_running_loop().call_later(self._shutdown_timeout, self._end_requests)
        else:
            self._end_requests()

    async def _exit_when_idle(self) -> None:
        """Until then new requests, and /health, are answered with 503."""
        while self._work.admitted:
            await asyncio.sleep(0.05)
        self.should_exit = True

    def _end_requests(self) -> None:
        if self._work.admitted:
            _log.warning("ending %d sequences that are not finished", self._work.admitted)
        self._work.abort_all()
        asyncio.get_running_loop().call_later(_AFTER_ABORT, self._end_connections)

    def _end_connections(self) -> None:
        self.should_exit = self.force_exit = True


def uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    """The options' limits and addresses."""
    config = uvicorn.Config(
        app,
        http=limited(connection_limit(options.max_connections), options.header_timeout),
        h11_max_incomplete_event_size=2 * MAX_HEADER_BYTES,  # AccessControl refuses what exceeds the limit itself
        proxy_headers=bool(options.forwarded_allow_ips),
        forwarded_allow_ips=options.forwarded_allow_ips,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile or None,
        ssl_certfile=options.ssl_certfile or None,
    )
    config.load()
    return config


def connection_limit(wanted: int) -> int:
    """Fewer where the system allows fewer open files: else no connection could be accepted, nor closed for another."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        allowed = needed if most == resource.RLIM_INFINITY else min(most, needed)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed < needed:
            limit = max(1, allowed - min(_OTHER_FILES, allowed // 2))
            _log.warning("at most %d connections at one time: the system allows %d open files", limit, allowed)
            return limit
    return wanted


def set_up_log(level: str) -> None:
    """One line each on stderr. A log that cannot be written, as on a full disk, must not end a request."""
    logging.raiseExceptions = False
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=level.upper())
    for name in ("uvicorn.error", "asyncio", "httpx"):  # httpx: each request to the hub
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
