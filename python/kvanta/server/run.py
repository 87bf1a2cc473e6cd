"""`kvanta serve`: binds the port, loads the model, serves until a signal, and lets running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from kvanta.calibration.automatic import add_query_matrices
from kvanta.engine.loaded_model import LoadedModel, node_config
from kvanta.engine.ranks import serve_node
from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.options.engine import EngineOptions
from kvanta.params.checks import one_line
from kvanta.parsers.reasoning import HARMONY
from kvanta.server.app import make_app
from kvanta.server.application import MAX_QUEUED, cors_of, make_service
from kvanta.server.http.connections import MAX_HEADER_BYTES, limited
from kvanta.server.http.hosts import AllowedHosts, is_loopback
from kvanta.server.http.idle_collection import IdleCollector, frozen_start
from kvanta.server.jobs.async_llm import AsyncLLM
from kvanta.server.jobs.service import Service
from kvanta.server.options import ServerOptions

_log = logging.getLogger("kvanta.server")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AFTER_ABORT = 5.0  # seconds for the last answers to reach their clients
# The engine's thread requests the interpreter for structured output; Python's default would make each step wait 5 ms.
_SWITCH_SECONDS = 0.0001
_MAX_DIGITS = 640  # of an integer in a body: the time that one takes grows with their square
# uvloop accepts one new connection per listener and iteration of the event loop, which may take 20 ms under load.
_LISTENERS = 16
_OTHER_FILES = 64  # files that the process may have open in addition to connections
_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BLOCK = 2**18


def serve(model: str, arguments: Mapping[str, Any], options: ServerOptions) -> int:
    """Returns the exit status. Raises InputError or ResourceError before it listens."""
    _set_up_log(options.log_level)
    if (node_rank := EngineOptions.read(arguments).node_rank or 0) > 0:
        _log.info("node %d: waiting for node 0", node_rank)
        return serve_node(node_config(model, arguments, add_query_matrices))
    _check_certificate(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(_bind(options)))
        _log.info("loading %s", model)
        begin = time.perf_counter()
        loaded = stack.enter_context(_models(model, {"max_queued_requests": MAX_QUEUED, **arguments}, options))
        _return_large_blocks()
        sys.setswitchinterval(_SWITCH_SECONDS)
        sys.set_int_max_str_digits(_MAX_DIGITS)
        front = AsyncLLM(loaded, time_limit=options.request_timeout)
        address = listener.getsockname()[0]
        service = make_service(front, model, options, allowed_hosts(options, address))
        _log.info("%s", loaded.summary())
        _log_parsers(service)
        _warn_if_public(options, address)
        warn_if_unfair(service.fair_by, options.api_key)
        app = make_app(service, cors=cors_of(options))
        _listen(listener, options)
        _log.info("%s", _banner(service, listener, options, time.perf_counter() - begin))
        server = _Server(_uvicorn_config(app, options), front, options.shutdown_timeout)
        with frozen_start(), asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve_model(listener))
    return 1 if loaded.lost_rank else 0


@contextlib.contextmanager
def _models(model: str, arguments: Mapping[str, Any], options: ServerOptions) -> Iterator[LoadedModel]:
    """The model in this process, or in replicas."""
    if options.replicas == 1 and options.prefill_replicas == 0:
        yield load(model, arguments, options)
        return
    from kvanta.ray import check_ray

    check_ray()
    from kvanta.ray.local import replicated_model

    with replicated_model(model, arguments, options) as loaded:
        yield loaded


class _Server(uvicorn.Server):
    """The first signal lets running requests finish, up to a limit; the second ends them."""

    def __init__(self, config: uvicorn.Config, front: AsyncLLM, shutdown_timeout: float) -> None:
        super().__init__(config)
        self._front = front
        self._shutdown_timeout = shutdown_timeout

    async def serve_model(self, listener: socket.socket) -> None:
        """Until a signal."""
        self._front.start()
        tasks = [asyncio.create_task(each) for each in (self._pass_warnings_on(), IdleCollector(self._front).run())]
        try:
            await self.serve(sockets=[listener, *(listener.dup() for _ in range(_LISTENERS - 1))])
        finally:
            for task in tasks:
                task.cancel()
            await self._front.stop()
            self._log_warnings()
        _log.info("stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's, which raises the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if not self._front.draining:
            running = self._front.admitted
            if running:
                limit = self._shutdown_timeout
                _log.info("finishing %d sequences, at most %g s; another signal ends them", running, limit)
            self._front.draining = True
            self._drain = asyncio.create_task(self._exit_when_idle())
            asyncio.get_running_loop().call_later(self._shutdown_timeout, self._end_requests)
        else:
            self._end_requests()

    async def _exit_when_idle(self) -> None:
        """Until then new requests, and /health, are answered with 503."""
        while self._front.admitted:
            await asyncio.sleep(0.05)
        self.should_exit = True

    def _end_requests(self) -> None:
        if self._front.admitted:
            _log.warning("ending %d sequences that are not finished", self._front.admitted)
        self._front.abort_all()
        asyncio.get_running_loop().call_later(_AFTER_ABORT, self._end_connections)

    def _end_connections(self) -> None:
        self.should_exit = self.force_exit = True

    async def _pass_warnings_on(self) -> None:
        while True:
            self._log_warnings()
            if self._front.loaded.lost_rank:  # the engine cannot go on: its requests have failed
                _log.error("%s", self._front.loaded.lost_rank)
                return self._signalled()
            await asyncio.sleep(1)

    def _log_warnings(self) -> None:
        warnings = self._front.loaded.warnings
        while warnings:
            _log.warning("%s", warnings.pop(0))


def _uvicorn_config(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
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


def allowed_hosts(options: ServerOptions, address: str) -> AllowedHosts | None:
    """`address`: the one that the server listens on."""
    if options.allowed_hosts:
        return AllowedHosts([options.host, *options.allowed_hosts])
    return AllowedHosts([options.host]) if is_loopback(address) and not options.api_key else None


def warn_if_unfair(fair_by: str, keys: Sequence[str]) -> None:
    """Logs that a server with these keys has only one user."""
    if fair_by == "api-key" and len(keys) < 2:
        _log.warning("--fair-by api-key has no effect with fewer than two keys (--api-key); see --fair-by user")


def _warn_if_public(options: ServerOptions, address: str) -> None:
    if not is_loopback(address) and not options.api_key:
        _log.warning("no --api-key: everyone who can reach %s may use this server", options.host)


def _check_certificate(options: ServerOptions) -> None:
    """Before the model is loaded."""
    if not options.ssl_certfile:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ValueError) as error:
        raise InputError(f"the certificate or its key cannot be read: {error}") from None


def _set_up_log(level: str) -> None:
    """One line each on stderr. A log that cannot be written, as on a full disk, must not end a request."""
    logging.raiseExceptions = False
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=level.upper())
    for name in ("uvicorn.error", "asyncio", "httpx"):  # httpx: each request to the hub
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _return_large_blocks() -> None:
    """Makes glibc return large blocks, such as bodies of requests, at once; else it keeps ever larger ones."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


def _bind(options: ServerOptions) -> socket.socket:
    """Binds before the model is loaded, so that a port in use is an immediate error."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InputError(f"host is {options.host!r}, which is no address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(options, error) from None
    return listener


def _listen(listener: socket.socket, options: ServerOptions) -> None:
    try:
        listener.listen(2048)
    except OSError as error:  # another process has taken the port
        raise _cannot_listen(options, error) from None


def _cannot_listen(options: ServerOptions, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot listen on {options.host} port {options.port}: {reason_of(error)}; see --host and --port"
    )


def load(model: str, arguments: Mapping[str, Any], options: ServerOptions) -> LoadedModel:
    """Loads the model with the tokenizer and chat template of the options; oddities are logged."""
    loaded = LoadedModel(
        model,
        arguments,
        options.tokenizer or None,
        options.chat_template or None,
        add_matrices=add_query_matrices,
    )
    vocab = int(loaded.engine.info.vocab)
    if len(loaded.tokenizer) > vocab:
        _log.warning(
            "the tokenizer has ids up to %d, the model only up to %d: is it another model's tokenizer?",
            len(loaded.tokenizer) - 1,
            vocab - 1,
        )
    while loaded.warnings:
        _log.warning("%s", loaded.warnings.pop(0))
    return loaded


def _log_parsers(service: Service) -> None:
    if service.parsers.reasoning is HARMONY and not (service.tool_call_parser or service.reasoning_parser):
        _log.info("the model writes in channels (GPT-OSS): reasoning and tool calls are separated from its answers")


def _banner(service: Service, listener: socket.socket, options: ServerOptions, seconds: float) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    address = f"[{host}]" if ":" in host else host
    where = f"{scheme}://{address}:{port}, loaded in {seconds:.1f} s"
    name = service.names[0] if service.names[0].isprintable() else one_line(service.names[0])
    return f"serving {name} on {where}; Ctrl-C stops"
