"""llama.cpp's own endpoints: /completion, /infill, /embedding, /props, /slots, /apply-template."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request, Response

from kvanta import __version__
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.http.errors import ApiError, JsonResponse, json_bytes
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import Encode, GenerationResponse, event
from kvanta.server.jobs.service import Service
from kvanta.server.llama_cpp.bodies import NAMES, LlamaCompletion, LlamaContent, LlamaInfill
from kvanta.server.openai.logprobs import finite
from kvanta.server.openai.pooling_api import Outputs, pooled
from kvanta.server.requests import prompts
from kvanta.server.requests.pooling_protocol import EmbeddingRequest
from kvanta.server.requests.protocol import CompletionRequest, TokenizeRequest
from kvanta.server.requests.translated import renamed_errors
from kvanta.text.tokenizer import Tokenizer

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
            if len(given) > 1 and request.stream:
                raise ApiError(400, "a stream has one prompt", param="prompt")
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
        return await complete(http, request, [await service.read(http, lambda: request.filled(tokenizer))])


def _add_state(app: FastAPI, service: Service) -> None:
    front = service.front

    def settings() -> dict[str, Any]:
        return {"n_ctx": front.max_model_len, "params": dict(front.loaded.default_sampling)}

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


class LlamaAnswer(GenerationResponse):
    """The answer of /completion: an object for a prompt, and a list for several."""

    def __init__(self, model: str, request: LlamaCompletion, job: GenerationJob, tokenizer: Tokenizer) -> None:
        super().__init__(job)
        self._model = model
        self._with_tokens = bool(request.return_tokens)
        self._with_probabilities = bool(request.n_probs)
        self._tokenizer = tokenizer

    def whole(self) -> Any:
        """When the job is finished."""
        answers = [self._finished(self._job.whole(index)) for index in range(len(self._job.outputs))]
        return answers if len(answers) > 1 else answers[0]

    def _piece(self, delta: Delta) -> dict[str, Any]:
        prompt = self._prompt_of(delta)
        return {
            "index": delta.choice,
            "content": delta.text,
            "tokens": self._tokens(delta),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": delta.end,
            "tokens_evaluated": len(prompt),
            **self._probabilities(delta),
        }

    def _finished(self, delta: Delta) -> dict[str, Any]:
        prompt, usage, now = self._prompt_of(delta), self.usage(), time.perf_counter()
        first = self._job.first_token_at or now
        kind = "limit" if delta.finish_reason == "length" else "word" if isinstance(delta.stop_reason, str) else "eos"
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            **self._piece(delta),
            "stop": True,
            "model": self._model,
            "prompt": self._job.generations[0].output.prompt or "",
            "truncated": False,
            "has_new_line": "\n" in self._job.outputs[delta.choice].text,
            "stop_type": kind,
            "stopping_word": delta.stop_reason if isinstance(delta.stop_reason, str) else "",
            "tokens_cached": cached,
            "timings": {
                **_timing("prompt", len(prompt) - cached, first - self._job.arrival),
                **_timing("predicted", delta.end, now - first),
                "cache_n": cached,
            },
        }

    def _prompt_of(self, delta: Delta) -> list[int]:
        texts = len(self._job.outputs) // len(self._job.generations)
        return self._job.generations[delta.choice // texts].output.prompt_token_ids

    def _tokens(self, delta: Delta) -> list[int]:
        return self._job.outputs[delta.choice].token_ids[delta.begin : delta.end] if self._with_tokens else []

    def _probabilities(self, delta: Delta) -> dict[str, Any]:
        if not self._with_probabilities:
            return {}
        output = self._job.outputs[delta.choice]
        positions = zip(output.token_ids, output.logprobs or [], strict=False)
        found = []
        for token, entries in list(positions)[delta.begin : delta.end]:
            top = [self._entry(other, float(entry.logprob)) for other, entry in entries.items()]
            found.append({**self._entry(token, float(entries[token].logprob)), "top_logprobs": top})
        return {"completion_probabilities": found}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.bytes[token]
        return {"id": token, "token": data.decode(errors="replace"), "bytes": list(data), "logprob": finite(logprob)}

    def _first_events(self, encode: Encode) -> Iterator[bytes]:
        yield from ()

    def _delta_events(self, delta: Delta, encode: Encode) -> bytes:
        events = event(self._piece(delta), encode) if delta.text or delta.end > delta.begin else b""
        if delta.finished:
            end = Delta(delta.choice, "", delta.end, delta.end, delta.finish_reason, delta.stop_reason)
            events += event(self._finished(end), encode)
        return events

    def _last_events(self) -> Iterator[bytes]:
        yield from ()

    def _error_events(self, error: ApiError) -> Iterator[bytes]:
        yield event(error.body(), json_bytes)


def _timing(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    """Tokens and times of a part of the work, in milliseconds."""
    count, seconds = max(0, tokens), max(seconds, 1e-9)
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / max(1, count),
        f"{name}_per_second": count / seconds,
    }
