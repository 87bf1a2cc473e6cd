"""Replicas of `kvanta serve --replicas N`: a Ray of this machine's own, or the one that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvanta.engine.loaded_model import LoadedModel
from kvanta.server.options import ServerOptions

_log = logging.getLogger("kvanta.server")
_STARTS = 3


def cpus_of_each(replicas: int) -> int:
    """CPU threads of one of several engines on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // replicas)


def start_ray(address: str, **options: Any) -> None:
    """ray.init. Starts a node that died again: Ray ends it if its agent takes 15 s to start, on a busy machine."""
    import ray

    for left in reversed(range(_STARTS)):
        try:
            ray.init(address, **options)
            return
        except Exception as error:  # Ray raises nothing more specific
            if left == 0 or "timed out during startup" not in str(error):
                raise
            _log.warning("Ray's node did not start; starting it again")
            ray.shutdown()


@contextmanager
def replicated_model(model: str, arguments: Mapping[str, Any], options: ServerOptions) -> Iterator[LoadedModel]:
    """The model with options.replicas engines, which end with the context. Raises InputError or ResourceError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from kvanta.ray.deployments import engine_app, prefill_app, remote_model

    address = os.environ.get("RAY_ADDRESS")
    local = not address
    if local:
        arguments = {"threads": cpus_of_each(options.replicas + options.prefill_replicas), **arguments}
    server: dict[str, Any] = {"tokenizer": options.tokenizer, "replica_routing": options.replica_routing}
    server["prefill_replicas"] = options.prefill_replicas
    actor = {"num_cpus": 0} if local else None
    engines = engine_app(model, arguments, server, options.replicas, ray_actor_options=actor)
    prefill = prefill_app(model, arguments, server, options.replicas, ray_actor_options=actor)
    start_ray(address or "local", log_to_driver=True, include_dashboard=False if local else None)
    try:
        serve.start(proxy_location="Disabled")
        apps = {"kvanta": engines} if prefill is None else {"kvanta": engines, "kvanta-prefill": prefill}
        targets = [serve.RunTarget(app, name=name, route_prefix=None) for name, app in apps.items()]
        handles = serve.run_many(targets)  # all engines load at the same time
        description = handles[0].describe.remote().result(timeout_s=600)
        yield remote_model(handles[0], description, model, arguments, options, options.replicas, *handles[1:])
    finally:
        serve.shutdown()
        ray.shutdown()
