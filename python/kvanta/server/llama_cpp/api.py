"""llama.cpp's own endpoints: /completion, /infill, /embedding, /props, /slots, /apply-template."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from kvanta import __version__
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.http.errors import JsonResponse
from kvanta.server.jobs.service import Service
from kvanta.server.llama_cpp.answers import LlamaAnswer, generation_settings
from kvanta.server.llama_cpp.bodies import NAMES, LlamaCompletion, LlamaContent, LlamaInfill
from kvanta.server.openai.pooling_api import Outputs, pooled
from kvanta.server.requests import prompts
from kvanta.server.requests.pooling_protocol import EmbeddingRequest
from kvanta.server.requests.protocol import CompletionRequest, TokenizeRequest
from kvanta.server.requests.translated import renamed_errors

_FIELD_NAMES = {ours: theirs for theirs, ours in NAMES.items()}


def add_llama_cpp(app: FastAPI, service: Service) -> None:
    """Adds the endpoints."""
    _add_texts(app, service)
    _add_state(app, service)
    tokenizer = service.front.tokenizer

    @app.post("/apply-template")
    async def apply_template(request: TokenizeRequest) -> Response:
        """The prompt that the chat template makes of a conversation."""
        service.check_model(request.model)
        text = await service.front.off_loop(lambda: prompts.chat_text(request, tokenizer, service.notes_unread))
        return JsonResponse({"prompt": text})

    @app.post("/embedding")
    @app.post("/embeddings", include_in_schema=False)
    async def embedding(http: Request, request: LlamaContent) -> Response:
        """Embeddings of a text, or of several."""
        field = "content" if request.content is not None else "input"
        texts = await service.split(request.content if request.content is not None else request.input, field)

        def answer(outputs: Outputs) -> list[dict[str, Any]]:
            return [{"index": at, "embedding": [each.outputs.data.tolist()]} for at, each in enumerate(outputs)]

        return await pooled(service, http, EmbeddingRequest(input=""), {field: texts}, answer, with_usage=False)


def _add_texts(app: FastAPI, service: Service) -> None:
    front, tokenizer = service.front, service.front.tokenizer
    defaults = front.loaded.default_sampling

    async def complete(http: Request, request: LlamaCompletion, given: list[Any]) -> Response:
        def read() -> tuple[CompletionRequest, SamplingParams]:
            completion = request.completion(given)
            return completion, completion.sampling_params(
                max_tokens=defaults.get("max_tokens") if completion.max_tokens is None else completion.max_tokens,
                max_logprobs=service.max_logprobs,
                logprobs=completion.logprobs,
                defaults=defaults,
            )

        with renamed_errors(_FIELD_NAMES):
            completion, params = await service.read(http, read)
            return await service.completion(
                http, completion, params, given, lambda _, job: LlamaAnswer(service.names[0], request, job, tokenizer)
            )

    @app.post("/completion")
    @app.post("/completions", include_in_schema=False)
    async def completion(http: Request, request: LlamaCompletion) -> Response:
        """The text that follows a prompt, as llama.cpp has it."""
        service.check_model(request.model)
        return await complete(http, request, await service.read(http, lambda: request.prompts(tokenizer)))

    @app.post("/infill")
    async def infill(http: Request, request: LlamaInfill) -> Response:
        """The text between a prefix and a suffix."""
        service.check_model(request.model)
        return await complete(
            http, request, [await service.read(http, lambda: request.filled(tokenizer, front.max_model_len))]
        )


def _add_state(app: FastAPI, service: Service) -> None:
    front = service.front
    defaults = {"max_tokens": None, **front.loaded.default_sampling}

    def settings() -> dict[str, Any]:
        return {"n_ctx": front.max_model_len, "params": generation_settings(SamplingParams(**defaults))}

    @app.get("/props")
    async def props() -> Response:
        """Properties of the server, for llama.cpp's clients."""
        tokenizer = front.tokenizer
        template = tokenizer.chat_template
        return JsonResponse(
            {
                "default_generation_settings": settings(),
                "total_slots": int(front.loaded.engine.config.max_num_seqs),
                "model_path": front.loaded.name,
                "model_alias": service.names[0],
                "chat_template": "" if template is None else template.source,
                "bos_token": tokenizer.special_texts.get("bos_token", ""),
                "eos_token": tokenizer.special_texts.get("eos_token", ""),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"kvanta {__version__}",
                "is_sleeping": False,
            }
        )

    @app.get("/slots")
    async def slots() -> Response:
        """Sequences that may run at once; the first ones are busy."""
        running = int(front.loaded.stats()["running"])
        count = int(front.loaded.engine.config.max_num_seqs)
        return JsonResponse([{"id": at, "is_processing": at < running, **settings()} for at in range(count)])
