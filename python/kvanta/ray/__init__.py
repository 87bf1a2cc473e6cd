"""Replicas by Ray Serve (`pip install 'kvanta[ray]'`): applications for `serve run` and its config files.

    # fleet.py: `serve run fleet:app`
    import kvanta.ray
    app = kvanta.ray.app(model="smollm2", replicas=4, kv_cache_dtype="int4", threads=2)

In a config file: import_path kvanta.ray:app, and the arguments under args (docs/fleet.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvanta.errors import InputError
from kvanta.options.foreign import known_arguments
from kvanta.server import check_packages
from kvanta.server.options import OPTIONS, read_options

if TYPE_CHECKING:
    from ray.serve import Application

# Options of the process that listens, which is Ray's own proxy here (http_options of the config file).
_PROXY_OPTIONS = (
    "host",
    "port",
    "ssl_keyfile",
    "ssl_certfile",
    "root_path",
    "forwarded_allow_ips",
    "log_level",
    "max_connections",
    "header_timeout",
    "shutdown_timeout",
    "replicas",
)


def check_ray() -> None:
    """Raises InputError, with the command that installs them, when packages are missing."""
    check_packages()
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise InputError("replicas need Ray Serve; install with: pip install 'kvanta[ray]'")


def app(
    args: Mapping[str, Any] | None = None,
    *,
    model: str = "",
    replicas: int | str = 1,
    fronts: int = 1,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """An application: `fronts` deployments of the HTTP server, and `replicas` engines with a cache each.

    `args`: all of this as one mapping, as config files give it. `replicas`: a number, or "auto" with the limits of
    `autoscaling_config` (Ray Serve's, and target_cache_occupancy). `ray_actor_options`: of each engine; CPUs default
    to `threads`. `options`: those of `kvanta serve`, with underscores, but for the ones of Ray's own proxy. Raises
    InputError.
    """
    check_ray()
    if args is not None:
        return app(**args)
    from kvanta.ray.deployments import engine_app, front_app, prefill_app
    from kvanta.server.application import MAX_QUEUED

    if not model:
        raise InputError("model is missing: a folder, a .gguf file or a name")
    names = {name: option.name for option in OPTIONS for name in option.names}
    for name in options:
        if names.get(name) in _PROXY_OPTIONS:
            raise InputError(f"{name} is an option of Ray's proxy: give http_options of its config file instead")
    server = {names[name]: value for name, value in options.items() if name in names}
    arguments, _ = known_arguments({name: value for name, value in options.items() if name not in names})
    read_options(server)
    arguments = {"max_queued_requests": MAX_QUEUED, **arguments}
    engines = engine_app(model, arguments, server, replicas, autoscaling_config, ray_actor_options)
    most = int((autoscaling_config or {}).get("max_replicas", 1)) if replicas == "auto" else int(replicas)
    prefill = prefill_app(model, arguments, server, most, ray_actor_options)
    return front_app(engines, prefill, model, arguments, server, fronts, most)
