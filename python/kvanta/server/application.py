"""The application of a server's options, which one process or the fronts of a Ray cluster serve."""

from __future__ import annotations

from typing import Any

from kvanta.server.app import cors_arguments
from kvanta.server.http.hosts import AllowedHosts
from kvanta.server.jobs.async_llm import AsyncLLM
from kvanta.server.jobs.service import ANY_NAME, Service
from kvanta.server.options import ServerOptions

MAX_QUEUED = 1024  # unless --max-queued-requests says otherwise


def make_service(front: AsyncLLM, model: str, options: ServerOptions, hosts: AllowedHosts | None) -> Service:
    """The state of the application. `hosts`: None for a server whose proxy checks them."""
    front.metrics.vllm_names = options.metrics_prefix == "vllm"
    return Service(
        front,
        _names(options.served_model_name, model),
        max_logprobs=options.max_logprobs,
        api_keys=options.api_key,
        max_body_bytes=options.max_body_bytes,
        hosts=hosts,
        priorities=front.loaded.engine.config.scheduling_policy == "priority",
        fair_by=front.loaded.engine.config.fair_by,
        log_requests=options.log_requests,
        unlogged_paths=options.disable_access_log_for_endpoints,
        max_headers=options.h11_max_header_count,
        stream_ping_seconds=options.stream_ping_seconds,
        has_docs=not options.disable_fastapi_docs,
        store_bytes=options.store_responses,
        notes_unread=options.unsupported_content == "note",
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )


def _names(given: list[str], model: str) -> list[str]:
    """Names for clients; the first one is the answers', which ANY_NAME cannot be."""
    first = [name for name in given if name != ANY_NAME] or [model]
    return [*first, ANY_NAME] if ANY_NAME in given else first


def cors_of(options: ServerOptions) -> dict[str, Any] | None:
    """Arguments of make_app for other origins."""
    return cors_arguments(
        options.allowed_origins,
        credentials=options.allow_credentials,
        methods=options.allowed_methods,
        headers=options.allowed_headers,
    )
