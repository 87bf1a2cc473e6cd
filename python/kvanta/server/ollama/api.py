"""Ollama's endpoints: /api/chat, /api/generate, /api/embed, and the list of models."""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI, Request, Response

from kvanta import __version__
from kvanta.server.http.errors import ApiError, JsonResponse
from kvanta.server.http.hints import note
from kvanta.server.jobs.service import ANY_NAME, LATEST, Service
from kvanta.server.ollama.answers import NDJSON, OllamaAnswer, RawAnswer, line, loaded
from kvanta.server.ollama.bodies import FIELD_NAMES, IGNORED, OllamaChat, OllamaEmbed, OllamaGenerate, OllamaName
from kvanta.server.openai.pooling_api import Outputs, pooled
from kvanta.server.requests.fill_in import fill_tokens
from kvanta.server.requests.pooling_protocol import EmbeddingRequest
from kvanta.server.requests.translated import renamed_errors

API_LEVEL = "0.13.0"
"""Version of Ollama whose requests these are; clients compare it before they use a feature."""
_ABSENT = "models are chosen when the server starts: kvanta serve MODEL, or --models FILE for several"
_FOREVER = timedelta(days=365 * 100)


def add_ollama(app: FastAPI, service: Service) -> None:
    """Adds the endpoints."""
    _add_texts(app, service)
    _add_embeddings(app, service)
    _add_models(app, service)
    _add_absent(app)


def _check(service: Service, name: str | None) -> str:
    """The name for the answer. Raises ApiError."""
    if not name:
        raise ApiError(400, "model is required", param="model")
    service.check_model(name)
    return name


def _answer(value: dict[str, Any], streams: bool) -> Response:
    return Response(line(value), media_type=NDJSON) if streams else JsonResponse(value)


def _add_texts(app: FastAPI, service: Service) -> None:
    defaults, tokenizer = service.front.loaded.default_sampling, service.front.tokenizer

    @app.post("/api/chat")
    async def chat(http: Request, request: OllamaChat) -> Response:
        """The assistant's answer to a conversation, as Ollama has it."""
        model = _check(service, request.model)
        if request.loads:
            return _answer(loaded(model, "message", request.keep_alive == 0), streams=False)
        with renamed_errors(FIELD_NAMES):
            body = await service.read(http, request.chat)
            body.model = None
            return await service.chat(
                http, body, lambda _, job, shape: OllamaAnswer(model, body, job, shape, tokenizer, is_generate=False)
            )

    @app.post("/api/generate")
    async def generate(http: Request, request: OllamaGenerate) -> Response:
        """The answer to a prompt, through the chat template, or with `raw` what follows it."""
        model = _check(service, request.model)
        if request.loads:
            return _answer(loaded(model, "response", request.keep_alive == 0), streams=False)
        template = tokenizer.chat_template
        with renamed_errors({**FIELD_NAMES, "prompt": "prompt", "messages": "prompt"}):
            if request.raw or request.suffix or template is None:
                completion = await service.read(http, lambda: request.completion(tokenizer))
                given = completion.max_tokens
                params = await service.read(
                    http,
                    lambda: completion.sampling_params(
                        max_tokens=defaults.get("max_tokens") if given is None else given,
                        max_logprobs=service.max_logprobs,
                        logprobs=completion.logprobs,
                        defaults=defaults,
                    ),
                )
                return await service.completion(
                    http, completion, params, completion.prompts, lambda _, job: RawAnswer(model, job, tokenizer)
                )
            body = await service.read(http, request.chat)
            body.model = None
            return await service.chat(
                http, body, lambda _, job, shape: OllamaAnswer(model, body, job, shape, tokenizer, is_generate=True)
            )


def _add_embeddings(app: FastAPI, service: Service) -> None:
    async def embedded(http: Request, request: OllamaEmbed, given: Any, field: str, *, single: bool) -> Response:
        model = _check(service, request.model)
        if request.keep_alive is not None:
            note("keep_alive", IGNORED["keep_alive"].reason)
        truncation = None if request.truncate is False else -1
        body = EmbeddingRequest(input=given, dimensions=request.dimensions, truncate_prompt_tokens=truncation)

        def answer(outputs: Outputs) -> dict[str, Any]:
            found = [output.outputs.data.tolist() for output in outputs]
            if single:
                return {"embedding": found[0]}
            tokens = sum(len(output.prompt_token_ids) for output in outputs)
            total = round((time.perf_counter() - http.state.arrival) * 1e9)
            figures = {"total_duration": total, "load_duration": 0, "prompt_eval_count": tokens}
            return {"model": model, "embeddings": found, **figures}

        with renamed_errors({"input": field}):
            texts = await service.split(given, field)
            return await pooled(service, http, body, {field: texts}, answer, with_usage=False)

    @app.post("/api/embed")
    async def embed(http: Request, request: OllamaEmbed) -> Response:
        """Embeddings of a text, or of several."""
        return await embedded(http, request, request.input, "input", single=False)

    @app.post("/api/embeddings")
    async def embeddings(http: Request, request: OllamaEmbed) -> Response:
        """The embedding of one text, in Ollama's older form."""
        return await embedded(http, request, request.prompt, "prompt", single=True)


def _add_models(app: FastAPI, service: Service) -> None:
    started = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def details() -> dict[str, Any]:
        info = service.front.loaded.engine.info
        family = info.architecture.removesuffix("ForCausalLM").lower()
        stats = service.front.loaded.stats()
        millions = info.parameters / 1e6
        return {
            "parent_model": "",
            "format": "kvanta",
            "family": family,
            "families": [family],
            "parameter_size": f"{millions / 1e3:.1f}B" if millions >= 1e3 else f"{millions:.0f}M",
            "quantization_level": str(stats.get("weight_dtype") or info.dtype),
        }

    def card(name: str) -> dict[str, Any]:
        info = service.front.loaded.engine.info
        tagged = name if ":" in name.rpartition("/")[2] else name + LATEST
        digest = hashlib.sha256(f"{name}|{info.hash}".encode()).hexdigest()
        head = {"name": tagged, "model": tagged, "size": int(info.weight_bytes), "digest": digest}
        return {**head, "details": details()}

    def cards() -> list[dict[str, Any]]:
        return [card(name) for name in service.names if name != ANY_NAME]

    @app.get("/api/tags")
    async def tags() -> Response:
        """The models of the server."""
        return JsonResponse({"models": [{**each, "modified_at": started} for each in cards()]})

    @app.get("/api/ps")
    async def running() -> Response:
        """The models in memory: all of them."""
        expires = (datetime.now(UTC) + _FOREVER).isoformat().replace("+00:00", "Z")
        extra = {"expires_at": expires, "size_vram": 0, "context_length": service.front.max_model_len}
        return JsonResponse({"models": [{**each, **extra} for each in cards()]})

    @app.get("/api/version")
    async def version() -> Response:
        """The level of Ollama's API, and the server's own version."""
        return JsonResponse({"version": API_LEVEL, "kvanta": __version__})

    @app.post("/api/show")
    async def show(request: OllamaName) -> Response:
        """The model's sizes, template and capabilities."""
        _check(service, request.given)
        info, tokenizer = service.front.loaded.engine.info, service.front.tokenizer
        template = tokenizer.chat_template
        family = details()["family"]
        capabilities = ["completion", "embedding"]
        if template is not None and service.tool_call_parser:
            capabilities.append("tools")
        if template is not None and service.reasoning_parser:
            capabilities.append("thinking")
        if fill_tokens(tokenizer) is not None:
            capabilities.append("insert")
        model_info = {
            "general.architecture": family,
            "general.parameter_count": int(info.parameters),
            f"{family}.context_length": service.front.max_model_len,
            f"{family}.embedding_length": int(info.hidden),
            f"{family}.block_count": int(info.layers),
            f"{family}.attention.head_count": int(info.heads),
            f"{family}.attention.head_count_kv": int(info.kv_heads),
        }
        text = "" if template is None else template.source
        parameters = "\n".join(f"{name} {value}" for name, value in service.front.loaded.default_sampling.items())
        return JsonResponse(
            {
                "modelfile": f"FROM {service.front.loaded.name}\n",
                "parameters": parameters,
                "template": text,
                "details": details(),
                "model_info": model_info,
                "capabilities": capabilities,
                "modified_at": started,
            }
        )

    @app.post("/api/pull")
    async def pull(request: OllamaName) -> Response:
        """Success for a model that is here: clients pull before they chat."""
        name = request.given
        try:
            _check(service, name)
        except ApiError:
            raise ApiError(404, f"pull of {name[:100]!r}: {_ABSENT}") from None
        return _answer({"status": "success"}, streams=request.stream is not False)


def _add_absent(app: FastAPI) -> None:
    async def absent(http: Request) -> Response:
        raise ApiError(501, f"{http.url.path} is not implemented: {_ABSENT}")

    for method, path in (
        *(("POST", f"/api/{name}") for name in ("push", "create", "copy")),
        ("DELETE", "/api/delete"),
        *((method, "/api/blobs/{digest}") for method in ("HEAD", "POST")),
    ):
        app.add_api_route(path, absent, methods=[method], include_in_schema=False)
