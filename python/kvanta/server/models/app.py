"""The application in front of several models: passes a request on to the model that its body names."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvanta import __version__
from kvanta.errors import KvantaError
from kvanta.server.anthropic.messages_api import wants_anthropic
from kvanta.server.app import PAGE, add_error_handlers, add_page
from kvanta.server.application import cors_of
from kvanta.server.http.access import OPEN_PREFIX, AccessControl, HeadRequests, RequestLog, refuse_web_pages, route_path
from kvanta.server.http.errors import (
    OLLAMA_PATH,
    ApiError,
    JsonResponse,
    api_error,
    error_response,
    json_bytes,
    shutting_down,
)
from kvanta.server.http.hosts import AllowedHosts
from kvanta.server.http.time_slices import BodyReader
from kvanta.server.models import lists
from kvanta.server.models.forward import forward, while_connected
from kvanta.server.models.keep_alive import read_keep_alive
from kvanta.server.models.metrics import CONTENT_TYPE, metrics_page
from kvanta.server.models.pool import Model, ModelPool
from kvanta.server.ollama.answers import loaded
from kvanta.server.ollama.api import API_LEVEL
from kvanta.server.options import ServerOptions

_TAG = ":latest"
_CARDS = "/v1/models/"
_TEXTS = {"/api/chat": ("messages", "message"), "/api/generate": ("prompt", "response")}
"""Ollama's endpoints of texts -> their fields of prompt and answer."""
Handler = Callable[[Request], Awaitable[Response]]


class ModelRouter:
    """Lists, states and metrics of all models; every other request is the model's that it names."""

    def __init__(self, pool: ModelPool, default: str | None) -> None:
        """`default`: model of requests without a name, and with an unknown one; None: they get 404."""
        self.pool = pool
        self.draining = False
        self.admitted = 0
        """Requests to models that have not ended."""
        self.responses: Counter[int] = Counter()
        self._default = default
        self._created = int(time.time())
        self._reader = BodyReader()
        self._pages = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        add_error_handlers(self._pages)
        if PAGE.is_dir():
            add_page(self._pages, PAGE)
        self._routes: Mapping[tuple[str, str], Handler] = {
            ("GET", "/v1/models"): self._list,
            ("GET", "/health"): self._health,
            ("GET", "/v1/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/load"): self._load_figure,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._running,
            ("GET", "/api/version"): self._ollama_version,
            ("POST", "/api/pull"): self._pull,
            ("POST", "/models/load"): self._load,
            ("POST", "/models/unload"): self._unload,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        path = route_path(scope)
        try:
            if path == "/" or path.startswith(OPEN_PREFIX):
                await self._pages(scope, receive, send)
            else:
                await self._answer(path, scope, receive, send)
        except ClientDisconnect:
            return
        except (ApiError, KvantaError) as error:
            await error_response(api_error(error), path)(scope, receive, send)

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        query = dict(urllib.parse.parse_qsl(scope["query_string"].decode("latin-1")))
        handler = self._routes.get((scope["method"], path))
        if scope["method"] == "GET" and "model" not in query:
            handler = {"/props": self._props, "/slots": self._slots}.get(path, handler)
        if handler is not None:
            await (await handler(http))(scope, receive, send)
        elif scope["method"] == "GET" and path.startswith(_CARDS):
            await self._card(http, path.removeprefix(_CARDS))(scope, receive, send)
        else:
            await self._forward(path, query.get("model"), http, send)

    async def _forward(self, path: str, name: str | None, http: Request, send: Send) -> None:
        """Passes a request on. `name`: of the query; a body's is the one that counts."""
        if self.draining:
            raise shutting_down()
        body = await http.body()
        fields = await self._fields(body, name)
        of_ollama = path.startswith(OLLAMA_PATH)
        given = fields.get("model") or (fields.get("name") if of_ollama else None) or name
        model = self._named(given, self._default, of_ollama=of_ollama)
        keep_alive = None
        if of_ollama and fields.get("keep_alive") is not None:
            keep_alive = read_keep_alive(fields.pop("keep_alive"))
            prompt, answer = _TEXTS.get(path, ("", ""))
            if keep_alive == 0 and prompt and not fields.get(prompt):
                self.pool.unload(model)
                await JsonResponse(loaded(str(given), answer, unloads=True))(http.scope, http.receive, send)
                return
            body = json_bytes(fields)

        async def answer_by_model() -> None:
            async with self.pool.using(model, keep_alive) as socket:
                await forward(socket, model.name, http.scope, body, send)

        self.admitted += 1
        try:
            await while_connected(http.receive, answer_by_model())
        finally:
            self.admitted -= 1

    async def _fields(self, body: bytes, name: str | None) -> dict[str, Any]:
        """The fields of a body; what is no JSON object has none: the model answers with the error."""
        if not body:
            return {}
        try:
            value = await self._reader.read_json(body)
        except json.JSONDecodeError as error:
            if name is None and self._default is None:
                reason = f"{error.msg} at character {error.pos}"
                raise ApiError(400, f"the body is not valid JSON: {reason}") from None
            return {}
        return value if isinstance(value, dict) else {}

    def _named(self, name: Any, default: str | None = None, *, of_ollama: bool = True) -> Model:
        """The model of a name, which may have Ollama's tag, or the default one.

        Raises ApiError 404 with the names that are known.
        """
        models = self.pool.models
        if name is not None and not isinstance(name, str):
            raise ApiError(400, f"model must be a text, got {json.dumps(name)[:100]}", param="model")
        if name in models:
            return models[name]
        if name and of_ollama and name.removesuffix(_TAG) in models:
            return models[name.removesuffix(_TAG)]
        if default is not None:
            return models[default]
        known = ", ".join(models)
        message = f"there is no model {name[:100]!r} here; known: {known}" if name else f"give a model, one of: {known}"
        raise ApiError(404, message, code="model_not_found", param="model")

    async def _list(self, http: Request) -> Response:
        models = self.pool.models.values()
        if wants_anthropic(http):
            cards = [lists.anthropic_card(model, self._created) for model in models]
            ends = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
            return JsonResponse({"data": cards, "has_more": False, **ends})
        return JsonResponse({"object": "list", "data": [lists.openai_card(model, self._created) for model in models]})

    def _card(self, http: Request, name: str) -> Response:
        card = lists.anthropic_card if wants_anthropic(http) else lists.openai_card
        return JsonResponse(card(self._named(name), self._created))

    async def _health(self, _: Request) -> Response:
        if self.draining:
            raise shutting_down()
        return JsonResponse({"status": "ok", "models": {name: model.state for name, model in self.pool.models.items()}})

    async def _load_figure(self, _: Request) -> Response:
        return JsonResponse({"server_load": self.admitted})

    async def _version(self, _: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def _metrics(self, _: Request) -> Response:
        return Response(await metrics_page(self.pool, self.responses), media_type=CONTENT_TYPE)

    async def _props(self, _: Request) -> Response:
        return JsonResponse(lists.props(self.pool))

    async def _slots(self, _: Request) -> Response:
        return JsonResponse(await lists.slots(self.pool))

    async def _tags(self, _: Request) -> Response:
        cards = [lists.ollama_card(model, self._created) for model in self.pool.models.values()]
        return JsonResponse({"models": cards})

    async def _running(self, _: Request) -> Response:
        return JsonResponse({"models": lists.ollama_running(self.pool, self._created)})

    async def _ollama_version(self, _: Request) -> Response:
        return JsonResponse({"version": API_LEVEL, "kvanta": __version__})

    async def _pull(self, http: Request) -> Response:
        fields = await self._fields(await http.body(), None)
        self._named(fields.get("model") or fields.get("name"))
        return JsonResponse({"status": "success"})

    async def _load(self, http: Request) -> Response:
        """llama.cpp's: begins to load; the list of models has the state."""
        model = await self._managed(http)
        if model.state != "loaded":
            self.pool.load(model)
        return JsonResponse({"success": True})

    async def _unload(self, http: Request) -> Response:
        """llama.cpp's: running requests finish first."""
        model = await self._managed(http)
        if model.state == "unloaded":
            raise ApiError(400, f"the model {model.name!r} is not loaded", param="model")
        self.pool.unload(model)
        return JsonResponse({"success": True})

    async def _managed(self, http: Request) -> Model:
        refuse_web_pages(http)
        if self.draining:
            raise shutting_down()
        return self._named((await self._fields(await http.body(), None)).get("model"))

    def abort_all(self) -> None:
        """Makes every model end its requests with an error."""
        self.pool.abort()


def make_router_app(router: ModelRouter, options: ServerOptions, hosts: AllowedHosts | None) -> ASGIApp:
    """Puts keys, limits and the log in front of the router, as make_app does for one model."""
    headers = options.h11_max_header_count
    gated: ASGIApp = AccessControl(
        HeadRequests(router), options.api_key, options.max_body_bytes, hosts, max_headers=headers
    )
    if (cors := cors_of(options)) is not None:
        gated = CORSMiddleware(gated, **cors)

    def answered(_: Scope, status: int) -> None:
        router.responses[status] += 1

    unlogged = options.disable_access_log_for_endpoints
    return RequestLog(gated, answered, log_requests=options.log_requests, unlogged_paths=unlogged)
