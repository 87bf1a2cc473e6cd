"""`kvanta serve`: binds the port, loads the model, serves until a signal, and lets running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import uvicorn

from kvanta.calibration.automatic import add_query_matrices
from kvanta.engine.loaded_model import LoadedModel, node_config
from kvanta.engine.ranks import serve_node
from kvanta.options.engine import EngineOptions
from kvanta.params.checks import one_line
from kvanta.parsers.reasoning import HARMONY
from kvanta.server.app import make_app
from kvanta.server.application import MAX_QUEUED, cors_of, make_service
from kvanta.server.graceful import GracefulServer, set_up_log, uvicorn_config
from kvanta.server.http.idle_collection import IdleCollector, frozen_start
from kvanta.server.jobs.async_llm import AsyncLLM
from kvanta.server.jobs.service import Service
from kvanta.server.listening import (
    address_of,
    allowed_hosts,
    bound,
    check_certificate,
    listen,
    url_of,
    warn_if_public,
)
from kvanta.server.options import ServerOptions

_log = logging.getLogger("kvanta.server")
# The engine's thread requests the interpreter for structured output; Python's default would make each step wait 5 ms.
_SWITCH_SECONDS = 0.0001
_MAX_DIGITS = 640  # of an integer in a body: the time that one takes grows with their square
_M_MMAP_THRESHOLD = -3  # malloc.h
_LARGE_BLOCK = 2**18


def serve(model: str, arguments: Mapping[str, Any], options: ServerOptions) -> int:
    """Returns the exit status. Raises InputError or ResourceError before it listens."""
    set_up_log(options.log_level)
    if (node_rank := EngineOptions.read(arguments).node_rank or 0) > 0:
        _log.info("node %d: waiting for node 0", node_rank)
        return serve_node(node_config(model, arguments, add_query_matrices))
    check_certificate(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bound(options))
        _log.info("loading %s", model)
        begin = time.perf_counter()
        loaded = stack.enter_context(_models(model, {"max_queued_requests": MAX_QUEUED, **arguments}, options))
        _return_large_blocks()
        sys.setswitchinterval(_SWITCH_SECONDS)
        sys.set_int_max_str_digits(_MAX_DIGITS)
        front = AsyncLLM(loaded, time_limit=options.request_timeout)
        address = address_of(listener)
        service = make_service(front, model, options, allowed_hosts(options, address))
        _log.info("%s", loaded.summary())
        _log_parsers(service)
        warn_if_public(options, address)
        warn_if_unfair(service.fair_by, options.api_key)
        app = make_app(service, cors=cors_of(options))
        listen(listener, options)
        _log.info("%s", _banner(service, listener, options, time.perf_counter() - begin))
        server = _Server(uvicorn_config(app, options), front, options.shutdown_timeout)
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


class _Server(GracefulServer):
    """The server of one engine, which starts and ends with it."""

    def __init__(self, config: uvicorn.Config, front: AsyncLLM, shutdown_timeout: float) -> None:
        super().__init__(config, front, shutdown_timeout)
        self._front = front

    async def serve_model(self, listener: socket.socket) -> None:
        """Until a signal."""
        self._front.start()
        tasks = [asyncio.create_task(each) for each in (self._pass_warnings_on(), IdleCollector(self._front).run())]
        try:
            await self.serve_until_signal(listener)
        finally:
            for task in tasks:
                task.cancel()
            await self._front.stop()
            self._log_warnings()
        _log.info("stopped")

    async def _pass_warnings_on(self) -> None:
        while True:
            self._log_warnings()
            if self._front.loaded.lost_rank:  # the engine cannot go on: its requests have failed
                _log.error("%s", self._front.loaded.lost_rank)
                return self.signalled()
            await asyncio.sleep(1)

    def _log_warnings(self) -> None:
        warnings = self._front.loaded.warnings
        while warnings:
            _log.warning("%s", warnings.pop(0))


def warn_if_unfair(fair_by: str, keys: Sequence[str]) -> None:
    """Logs that a server with these keys has only one user."""
    if fair_by == "api-key" and len(keys) < 2:
        _log.warning("--fair-by api-key has no effect with fewer than two keys (--api-key); see --fair-by user")


def _return_large_blocks() -> None:
    """Makes glibc return large blocks, such as bodies of requests, at once; else it keeps ever larger ones."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)


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
    name = service.names[0] if service.names[0].isprintable() else one_line(service.names[0])
    return f"serving {name} on {url_of(listener, options)}, loaded in {seconds:.1f} s; Ctrl-C stops"
