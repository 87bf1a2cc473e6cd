"""`kvanta serve --models FILE`: binds the port and serves; models are loaded by their requests."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvanta.server.graceful import GracefulServer, connection_limit, set_up_log, uvicorn_config
from kvanta.server.listening import address_of, allowed_hosts, bound, check_certificate, listen, url_of, warn_if_public
from kvanta.server.models.app import ModelRouter, make_router_app
from kvanta.server.models.entry import ModelEntry
from kvanta.server.models.pool import ModelPool
from kvanta.server.options import ServerOptions
from kvanta.terminal.memory_limits import free_memory
from kvanta.terminal.tables import human_bytes

_log = logging.getLogger("kvanta.server")
_SHARE = 0.8
"""Part of the free memory that models may take without --memory-budget: their processes take some more."""
# A thread writes the page of metrics meanwhile; with Python's default, streams would wait 5 ms for it each time.
_SWITCH_SECONDS = 0.0001
_PASSED_ON = (
    "api_key",
    "log_level",
    "max_body_bytes",
    "h11_max_header_count",
    "shutdown_timeout",
    "disable_fastapi_docs",
)


def serve_models(
    entries: Sequence[ModelEntry], default: str | None, common: Mapping[str, Any], options: ServerOptions
) -> int:
    """Returns the exit status. `common`: options of every model, which those of an entry replace.

    Raises InputError or ResourceError before it listens.
    """
    set_up_log(options.log_level)
    check_certificate(options)
    budget = options.memory_budget or int(free_memory() * _SHARE)
    of_server = {name: getattr(options, name) for name in _PASSED_ON if getattr(options, name)}
    options_of_all = {**common, **of_server, "log_requests": False}
    sys.setswitchinterval(_SWITCH_SECONDS)
    connection_limit(2 * options.max_connections)  # each has one to a model's process
    with bound(options) as listener:
        address = address_of(listener)
        warn_if_public(options, address)
        listen(listener, options)

        pool = ModelPool(entries, budget, options_of_all, default)
        router = ModelRouter(pool, default)
        app = make_router_app(router, options, allowed_hosts(options, address))
        server = GracefulServer(uvicorn_config(app, options), router, options.shutdown_timeout)
        names, where = ", ".join(pool.models), url_of(listener, options)
        _log.info("serving %s on %s, in at most %s; Ctrl-C stops", names, where, human_bytes(budget))

        async def run() -> None:
            try:
                await server.serve_until_signal(listener)
            finally:
                await pool.close()

        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(run())
    _log.info("stopped")
    return 0
