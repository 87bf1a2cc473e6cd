"""Deployments of Ray Serve: engines, and fronts that run the HTTP application."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any, cast

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from kvanta import _core
from kvanta.constraints.structured_output import ConstraintRecipe, GrammarCompiler
from kvanta.constraints.token_mask import Matcher
from kvanta.engine.loaded_model import LoadedModel
from kvanta.errors import InputError, ResourceError
from kvanta.options.engine import EngineOptions
from kvanta.params.checks import one_line
from kvanta.ray.autoscaling import DEFAULT_TARGET_OCCUPANCY, ByRequestsAndCache
from kvanta.ray.engine_replica import EngineReplica
from kvanta.ray.messages import pack_recipe
from kvanta.ray.prefix_router import ROUTERS
from kvanta.ray.replicated_engine import LOST, ReplicatedEngine
from kvanta.server.app import make_app
from kvanta.server.application import MAX_QUEUED, cors_of, make_service
from kvanta.server.jobs.async_llm import AsyncLLM
from kvanta.server.options import ServerOptions, read_options

ENGINES, PREFILL = "EngineReplica", "PrefillReplica"
"""Names of the deployments."""
_STATS_SECONDS = 0.5
"""Between two reports of a replica's pages and counters."""
_HEALTH_SECONDS = 2.0
"""Between two checks of a replica; a dead one is replaced after the next."""
_DRAIN_LOOP_SECONDS = 0.2
"""Between two looks whether they have finished."""
_DRAIN_SECONDS = 120.0
"""Time for the requests of a replica that is to end, as in a rolling update; then they continue elsewhere."""


def engine_app(
    model: str,
    arguments: Mapping[str, Any],
    server: Mapping[str, Any],
    replicas: int | str,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
) -> serve.Application:
    """The engines. `arguments`: EngineOptions and ModelOptions; `server`: ServerOptions. Raises InputError."""
    automatic = replicas == "auto"
    if not automatic and not (isinstance(replicas, int) and replicas > 0):
        raise InputError(f"replicas must be a positive integer or auto, got {replicas!r}")
    if automatic != (autoscaling_config is not None):
        raise InputError("replicas = auto and autoscaling_config need each other")
    count = None if automatic else int(replicas)
    scaling = None if autoscaling_config is None else _scaling(autoscaling_config)
    arguments = _with_role(arguments, read_options(server))
    return _engines(ENGINES, model, arguments, server, count, scaling, ray_actor_options)


def _with_role(arguments: Mapping[str, Any], options: ServerOptions) -> dict[str, Any]:
    """Arguments of the engines that generate tokens."""
    return {**arguments, "role": "decode"} if options.prefill_replicas else dict(arguments)


def prefill_app(
    model: str,
    arguments: Mapping[str, Any],
    server: Mapping[str, Any],
    first_rank: int,
    ray_actor_options: Mapping[str, Any] | None = None,
) -> serve.Application | None:
    """The engines that compute prompts for the others; None without prefill_replicas. Raises InputError."""
    count = read_options(server).prefill_replicas
    if count == 0:
        return None
    if not arguments.get("kv_store"):
        raise InputError(f"prefill_replicas = {count}: needs kv_store, by which they pass prompts' pages on")
    arguments = {**arguments, "role": "prefill"}
    return _engines(PREFILL, model, arguments, server, count, None, ray_actor_options, first_rank)


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Ray Serve's autoscaling_config, with a policy by requests and cache unless it names another."""
    target = config.get("target_cache_occupancy", DEFAULT_TARGET_OCCUPANCY)
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target <= 1:
        raise InputError(f"target_cache_occupancy must be above 0 and at most 1, got {one_line(target)}")
    policy = {"policy_function": ByRequestsAndCache, "policy_kwargs": {"target_cache_occupancy": target}}
    given = {name: value for name, value in config.items() if name != "target_cache_occupancy"}
    return {"policy": policy, **given}


def _engines(
    name: str,
    model: str,
    arguments: Mapping[str, Any],
    server: Mapping[str, Any],
    replicas: int | None,
    autoscaling_config: Mapping[str, Any] | None,
    ray_actor_options: Mapping[str, Any] | None,
    first_rank: int = 0,
) -> serve.Application:
    values = EngineOptions.read(arguments)
    for option in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(values, option) or 1) != 1:
            raise InputError(f"{option} = {size}: not supported with replicas, each of which is one process; use 1")
    options = read_options(server)
    actor = {"num_cpus": values.threads or 1, **(ray_actor_options or {})}
    deployment = serve.deployment(EngineReplica).options(
        name=name,
        num_replicas=replicas,
        autoscaling_config=autoscaling_config,
        ray_actor_options=actor,
        max_ongoing_requests=(values.max_num_seqs or 64) + (values.max_queued_requests or MAX_QUEUED),
        health_check_period_s=_HEALTH_SECONDS,
        logging_config={"enable_access_log": False},
        graceful_shutdown_wait_loop_s=_DRAIN_LOOP_SECONDS,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTERS[options.replica_routing],
            request_router_kwargs={"page_size": values.block_size or 64},
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
    )
    return deployment.bind(model, arguments, options.tokenizer or None, first_rank)


def front_app(
    engines: serve.Application,
    prefill: serve.Application | None,
    model: str,
    arguments: Mapping[str, Any],
    server: Mapping[str, Any],
    fronts: int,
    max_replicas: int,
) -> serve.Application:
    """The HTTP server's application in front of the engines."""
    ingress = serve.ingress(Front(model, arguments, server, max_replicas))(_Ingress)
    deployment = serve.deployment(ingress).options(
        name="Front",
        num_replicas=fronts,
        max_ongoing_requests=10_000,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOP_SECONDS,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(engines, prefill)


class _Ingress:
    """Ties the engines to the front's application; Front gets their handle itself."""

    def __init__(self, engines: DeploymentHandle, prefill: DeploymentHandle | None) -> None:
        self._engines = engines, prefill


class Front:
    """The HTTP application; it loads the tokenizer with the first request, and no weights."""

    def __init__(self, model: str, arguments: Mapping[str, Any], server: Mapping[str, Any], max_replicas: int) -> None:
        self._settings = (model, arguments, server)
        self._max_replicas = max_replicas
        self._app: asyncio.Future[ASGIApp] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            return
        if self._app is None:
            self._app = asyncio.ensure_future(self._make())
        try:
            app = await asyncio.shield(self._app)
        except Exception:
            self._app = None  # the next request tries again
            raise
        await app(scope, receive, send)

    async def _make(self) -> ASGIApp:
        model, arguments, server = self._settings
        options = read_options(server)
        application = serve.get_replica_context().app_name
        handle = serve.get_deployment_handle(ENGINES, application)
        prefill = serve.get_deployment_handle(PREFILL, application) if options.prefill_replicas else None
        description = await self._describe(handle, {"model": model, "arguments": _with_role(arguments, options)})
        make = functools.partial(
            remote_model, handle, description, model, arguments, options, self._max_replicas, prefill
        )
        loaded = await asyncio.to_thread(make)
        front = AsyncLLM(loaded, time_limit=options.request_timeout)
        service = make_service(front, model, options, None)
        front.start()
        return make_app(service, cors=cors_of(options))

    async def _describe(self, handle: DeploymentHandle, settings: dict[str, Any]) -> dict[str, Any]:
        """The description of a replica that was made of these settings: during an update there are others, or none."""
        end = asyncio.get_running_loop().time() + _DRAIN_SECONDS
        while True:
            try:
                found = await asyncio.to_thread(lambda: handle.broadcast("describe").results(timeout_s=60))
            except LOST:
                if asyncio.get_running_loop().time() > end:
                    raise
                found = []
            for description in found:
                if {name: description[name] for name in settings} == settings:
                    return dict(description)
            if asyncio.get_running_loop().time() > end:
                raise ResourceError("no replica with this front's settings: is the deployment being changed?")
            await asyncio.sleep(_STATS_SECONDS)


def remote_model(
    handle: DeploymentHandle,
    description: Mapping[str, Any],
    model: str,
    arguments: Mapping[str, Any],
    options: ServerOptions,
    replicas: int,
    prefill: DeploymentHandle | None = None,
) -> LoadedModel:
    """The model as a front has it: tokenizer, template and grammars, and the replicas as its engine.

    `replicas`: at most, for the number of requests that the front takes. `prefill`: those that compute prompts.
    """

    def make_engine(config: _core.EngineConfig) -> _core.Engine:
        info = _core.read_model_info(config.model, config.dtype, config.weight_dtype)
        info.eos_token_ids = list(dict.fromkeys([*info.eos_token_ids, *config.eos_token_ids]))
        engine = ReplicatedEngine(handle, dict(description), info, replicas=replicas, prefill=prefill)
        return cast("_core.Engine", engine)

    return LoadedModel(
        model,
        arguments,
        options.tokenizer or None,
        options.chat_template or None,
        make_engine=make_engine,
        compiler=_Recipes,
    )


class _Recipes(GrammarCompiler):
    """Checks a grammar here, and gives the engine its recipe: the masks are made where the request runs."""

    def constraint(self, matcher: Matcher, recipe: ConstraintRecipe) -> _core.TokenConstraint:
        """The recipe, packed."""
        del matcher
        return cast("_core.TokenConstraint", pack_recipe(recipe))
