"""The application: every endpoint, and its middleware."""

from __future__ import annotations

import functools
import mimetypes
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

from kvanta import __version__
from kvanta.errors import InputError, ResourceError, about
from kvanta.params.checks import one_line
from kvanta.server.anthropic.messages_api import add_messages, anthropic_model, anthropic_models, wants_anthropic
from kvanta.server.http.absent_endpoints import reason_for
from kvanta.server.http.access import OPEN_PREFIX, AccessControl, HeadRequests, RequestLog, refuse_web_pages, route_path
from kvanta.server.http.admission import AdmissionLimiter
from kvanta.server.http.errors import ApiError, JsonResponse, api_error, error_response, json_bytes, shutting_down
from kvanta.server.http.hints import HEADER
from kvanta.server.http.time_slices import BodyReader, large_json_bytes
from kvanta.server.jobs.service import ANY_NAME, Service
from kvanta.server.llama_cpp.api import add_llama_cpp
from kvanta.server.ollama.api import add_ollama
from kvanta.server.openai.chat import ChatResponse
from kvanta.server.openai.completions import CompletionResponse
from kvanta.server.openai.pooling_api import add_pooling
from kvanta.server.openai.responses_api import add_responses
from kvanta.server.openai.schema import describe
from kvanta.server.requests import prompts
from kvanta.server.requests.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvanta.server.requests.translated import renamed_errors
from kvanta.server.sglang.router import sglang_router
from kvanta.text.prompts import token_list

PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def make_app(service: Service, *, cors: Mapping[str, Any] | None = None) -> ASGIApp:
    """`cors`: arguments of Starlette's CORSMiddleware; None allows no other origin. The engine must be started."""
    schema_path = "/openapi.json" if service.has_docs else None
    app = FastAPI(title="Kvanta", version=__version__, docs_url=None, redoc_url=None, openapi_url=schema_path)
    app.router.route_class = _route_class(service)
    add_error_handlers(app)
    _add_texts(app, service)
    add_responses(app, service)
    add_messages(app, service)
    add_pooling(app, service)
    add_ollama(app, service)
    add_llama_cpp(app, service)
    _add_tokenizer(app, service)
    _add_models(app, service)
    _add_state(app, service)
    sglang_router(service, app.router)
    describe(app, needs_key=bool(service.api_keys))
    if PAGE.is_dir():
        add_page(app, PAGE)
    gated: ASGIApp = AccessControl(
        AdmissionLimiter(HeadRequests(app)),
        service.api_keys,
        service.max_body_bytes,
        service.hosts,
        max_headers=service.max_headers,
    )
    if cors is not None:
        gated = CORSMiddleware(gated, **cors)
    known = {getattr(route, "path", "") for route in app.routes}

    def answered(scope: Scope, status: int) -> None:
        path = route_path(scope)
        path = path if path in known else "other"
        service.front.metrics.responses[path, str(status)] += 1

    return RequestLog(gated, answered, log_requests=service.log_requests, unlogged_paths=service.unlogged_paths)


def _route_class(service: Service) -> type[APIRoute]:
    """Routes whose bodies are read in time slices."""
    reader = BodyReader()

    class BodyRequest(Request):
        async def json(self) -> Any:
            if not hasattr(self, "_json"):
                self._json = await reader.read_json(await self.body())
            return self._json

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def read(request: Request) -> Response:
                return await handle(BodyRequest(_as_json(request.scope), request.receive))

            return read

    return Route


def _as_json(scope: Scope) -> Scope:
    """The request with JSON as its type, which litellm and `curl -d` do not name, unless a page in a browser sent it.

    Browsers send other types to foreign servers without asking these first, but always with one of the two headers.
    """
    headers = Headers(scope=scope)
    if "origin" in headers or "sec-fetch-site" in headers:
        return scope
    others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def add_error_handlers(app: FastAPI) -> None:
    """Answers every error in the shape that clients of its path know."""

    def answer(http: Request, error: ApiError) -> Response:
        return error_response(error, route_path(http.scope))

    async def ours(http: Request, error: Exception) -> Response:
        return answer(http, api_error(error))

    async def too_deep(http: Request, _: Exception) -> Response:
        return answer(http, ApiError(400, "the body is nested too deeply"))

    async def of_starlette(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ApiError):
            return answer(http, error)
        message = str(error.detail)
        if error.status_code == 404:
            paths = dict.fromkeys(route.path_format for route in app.routes if isinstance(route, Route))
            reason = reason_for(route_path(http.scope))
            because = f": {reason}" if reason else ""
            message = f"there is no endpoint {http.url.path[:100]}{because}; known: {', '.join(paths)}"
        elif error.status_code == 405:
            allowed = ", ".join(_methods(app, http))
            message = f"{http.url.path[:100]} does not take {http.method[:20]}; allowed: {allowed}"
            return answer(http, ApiError(405, message, headers={"Allow": allowed}))
        return answer(http, ApiError(error.status_code, message, headers=error.headers))

    async def of_fastapi(http: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            reason = f"{first['ctx']['error']} at character {first['loc'][-1]}"
            return answer(http, ApiError(400, f"the body is not valid JSON: {reason}"))
        if isinstance(first.get("input"), bytes):
            return answer(http, ApiError(400, "the body must be JSON, with Content-Type: application/json"))
        where = ".".join(str(part) for part in first["loc"][1:])
        given = "" if first["type"] == "missing" else f", not {one_line(first.get('input'))}"
        message = f"{where or 'the body'}: {first['msg']}{given}"
        return answer(http, ApiError(400, message, param=where or None))

    async def fault(http: Request, _: Exception) -> Response:  # raised again afterwards, for the log
        where = f"request {http.state.request_id}; the server's log has the details"
        return answer(http, ApiError(500, f"internal error ({where})"))

    app.add_exception_handler(InputError, ours)
    app.add_exception_handler(ResourceError, ours)
    app.add_exception_handler(RecursionError, too_deep)
    app.add_exception_handler(Exception, fault)
    app.add_exception_handler(HTTPException, of_starlette)
    app.add_exception_handler(RequestValidationError, of_fastapi)


def _methods(app: FastAPI, http: Request) -> list[str]:
    """Methods of a path: those of all routes, where Starlette's error has those of the first one alone."""
    routes = [route for route in app.router.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(http.scope)[0] is not Match.NONE]
    methods = {method for route in matching for method in route.methods or ()}
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _add_texts(app: FastAPI, service: Service) -> None:
    front, tokenizer = service.front, service.front.tokenizer
    defaults = front.loaded.default_sampling

    @app.post("/v1/completions")
    async def completions(http: Request, request: CompletionRequest) -> Response:
        """Texts that follow prompts."""
        service.check_model(request.model)
        echo = bool(request.echo)
        max_tokens = defaults.get("max_tokens", 16) if request.max_tokens is None else request.max_tokens
        read = functools.partial(
            request.sampling_params,
            max_tokens=1 if echo and max_tokens == 0 else max_tokens,  # the engine always makes one token
            max_logprobs=service.max_logprobs,
            logprobs=request.logprobs,
            echo=echo,
            defaults=defaults,
        )
        params = await service.read(http, read)
        with renamed_errors(request.given_names):
            return await service.completion(
                http,
                request,
                params,
                await service.read(http, lambda: request.filled(tokenizer)),
                lambda name, job: CompletionResponse(name, service.names[0], request, job, tokenizer),
                add_special_tokens=request.add_special_tokens is not False,
            )

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request, request: ChatRequest) -> Response:
        """The assistant's answer to a conversation."""
        with renamed_errors(request.given_names):
            return await service.chat(
                http,
                request,
                lambda name, job, shape: ChatResponse(name, service.names[0], request, job, tokenizer, shape),
            )


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    front, tokenizer = service.front, service.front.tokenizer

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Response:
        """Token ids of a prompt, or of a conversation."""
        service.check_model(request.model)
        is_llamas = request.content is not None
        if is_llamas:
            request.prompt, request.add_special_tokens = request.content, bool(request.add_special)
        if (request.prompt is None) == (request.messages is None):
            raise InputError("give either prompt or messages", "prompt")

        def encode() -> list[int]:
            if request.messages is not None:
                text, special = (
                    prompts.chat_text(request, tokenizer, service.notes_unread),
                    bool(request.add_special_tokens),
                )
            else:
                text, special = request.prompt or "", request.add_special_tokens is not False
            prompts.check_length(text, tokenizer, front.max_model_len)
            with about("prompt"):
                return tokenizer.encode(text, add_special_tokens=special)

        def answer() -> bytes:
            with renamed_errors({} if request.messages is None else {"prompt": "messages"}):
                tokens = encode()
            body: dict[str, Any] = {"count": len(tokens), "max_model_len": front.max_model_len, "tokens": tokens}
            if is_llamas:
                pieces = [{"id": token, "piece": tokenizer.token_text(token)} for token in tokens]
                return large_json_bytes({"tokens": pieces if request.with_pieces else tokens})
            if request.return_token_strs:
                body["token_strs"] = [tokenizer.token_text(token) for token in tokens]
            return large_json_bytes(body)

        return Response(await front.off_loop(answer), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Response:
        """The text of token ids."""
        service.check_model(request.model)
        if not isinstance(request.tokens, list):
            raise InputError(f"tokens must be a list of token ids, got {one_line(request.tokens)}", "tokens")
        given, most = request.tokens, front.max_model_len
        if len(given) > most:
            raise ApiError(400, f"tokens has {len(given)} token ids; max_model_len is {most}", param="tokens")

        def answer() -> bytes:
            with about("tokens"):
                tokens = token_list(given, int(front.loaded.engine.info.vocab))
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            return json_bytes({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's

        return Response(await front.off_loop(answer), media_type="application/json")


def _add_models(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models(http: Request) -> Response:
        """The one model, under each of its names."""
        if wants_anthropic(http):
            return JsonResponse(anthropic_models(service, created))
        return JsonResponse(
            {
                "object": "list",
                "data": [service.model_card(name, created) for name in service.names if name != ANY_NAME],
            }
        )

    @app.get("/v1/models/{name:path}")
    async def model(http: Request, name: str) -> Response:
        """One of them."""
        if not name:  # /v1/models/
            return await models(http)
        service.check_model(name)
        card = anthropic_model if wants_anthropic(http) else Service.model_card
        return JsonResponse(card(service, name, created))


def _add_state(app: FastAPI, service: Service) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(service.front.metrics)

    @app.get("/health")
    @app.get("/v1/health", include_in_schema=False)
    async def health() -> Response:
        """200 while requests are taken, 503 while the server shuts down."""
        if service.front.draining:
            raise shutting_down()
        return JsonResponse({"status": "ok"})

    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def ping() -> Response:
        return await health()

    @app.get("/load")
    async def load() -> Response:
        """The number of requests that are waiting or answered now."""
        return JsonResponse({"server_load": service.front.open_requests})

    @app.get("/version")
    async def version() -> Response:
        """The server's version."""
        return JsonResponse({"version": __version__})

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(http: Request) -> Response:
        """Gives up every cached prefix that no running request uses."""
        refuse_web_pages(http)
        await service.front.off_loop(service.front.loaded.engine.reset_prefix_cache)
        return Response()

    @app.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Serves the metrics for Prometheus."""
        encode: Any
        try:
            encode, kind = choose_encoder(http.headers.get("accept", ""))
        except (TypeError, ValueError):  # a malformed version
            encode, kind = choose_encoder("")
        # No name needs to be escaped, and the library would do it to the colons of samples in OpenMetrics.
        return Response(encode(registry, escaping=ALLOWUTF8), media_type=kind)


def add_page(app: FastAPI, folder: Path) -> None:
    """GET / and the page's other files, read once: no request's path reaches the file system."""
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def answer(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"there is no page {name[:100]!r}")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(files[name], media_type=kind, headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return answer("index.html")

    @app.get(OPEN_PREFIX + "{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        return answer(name)


def cors_arguments(
    origins: Sequence[str], *, credentials: bool, methods: Sequence[str], headers: Sequence[str]
) -> dict[str, Any] | None:
    """Arguments for `cors`."""
    if not origins:
        return None
    return {
        "allow_origins": list(origins),
        "allow_credentials": credentials,
        "allow_methods": list(methods),
        "allow_headers": list(headers),
        "expose_headers": ["X-Request-Id", "Retry-After", HEADER],
    }
