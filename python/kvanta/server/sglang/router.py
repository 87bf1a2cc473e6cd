"""SGLang's own endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from kvanta import __version__
from kvanta.params.sampling_params import SamplingParams
from kvanta.server.http.access import refuse_web_pages
from kvanta.server.http.errors import ApiError, JsonResponse
from kvanta.server.jobs.service import Service
from kvanta.server.requests.protocol import CompletionRequest
from kvanta.server.requests.translated import renamed_errors
from kvanta.server.sglang.generate import MAX_TOKENS, GenerateRequest, GenerateResponse
from kvanta.text.prompts import TokenPrompt

HEALTH_SECONDS = 20.0


def sglang_router(service: Service, router: APIRouter) -> APIRouter:
    """Adds the endpoints to `router`."""
    front, tokenizer = service.front, service.front.tokenizer
    engine, defaults = front.loaded.engine, front.loaded.default_sampling

    @router.post("/generate")
    async def generate(http: Request, request: GenerateRequest) -> Response:
        """SGLang's form of completions."""
        service.check_model(request.model)

        def read() -> tuple[CompletionRequest, SamplingParams]:
            completion = request.completion()
            max_tokens = completion.max_tokens
            return completion, completion.sampling_params(
                max_tokens=defaults.get("max_tokens", MAX_TOKENS) if max_tokens is None else max_tokens,
                max_logprobs=service.max_logprobs,
                logprobs=request.logprobs,
                defaults=defaults,
            )

        with renamed_errors(request.given_names):
            completion, params = await service.read(http, read)
            if request.prompt_logprobs is not None:
                params.prompt_logprobs = request.prompt_logprobs
            eos_tokens = list(engine.info.eos_token_ids)
            return await service.completion(
                http,
                completion,
                params,
                request.prompts,
                lambda name, job: GenerateResponse(name, request, job, tokenizer, eos_tokens),
                add_special_tokens=completion.add_special_tokens is not False,
            )

    def model_info() -> dict[str, Any]:
        info = engine.info
        return {
            "model_path": front.loaded.name,
            "served_model_name": service.names[0],
            "tokenizer_path": front.loaded.name,
            "is_generation": True,
            "preferred_sampling_params": dict(defaults) or None,
            "weight_version": "default",
            "reasoning_parser": service.reasoning_parser or None,
            "tool_call_parser": service.tool_call_parser or None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "architectures": [info.architecture],
        }

    @router.get("/model_info")
    @router.get("/get_model_info", include_in_schema=False)
    async def get_model_info() -> Response:
        """The model, as SGLang describes it."""
        return JsonResponse(model_info())

    @router.get("/server_info")
    @router.get("/get_server_info", include_in_schema=False)
    async def get_server_info() -> Response:
        """The server's configuration and load."""
        stats = front.loaded.stats()
        config = engine.config
        return JsonResponse(
            {
                **model_info(),
                "version": __version__,
                "context_length": front.max_model_len,
                "kv_cache_dtype": stats["kv_cache_dtype"],
                "page_size": config.page_size,
                "max_running_requests": config.max_num_seqs,
                "max_total_num_tokens": front.loaded.summary().all_tokens,
                "facts": {fact.name: {"value": fact.value, "source": fact.source} for fact in front.loaded.facts},
                "internal_states": [{"num_running_reqs": stats["running"], "num_waiting_reqs": stats["waiting"]}],
            }
        )

    @router.post("/flush_cache")
    @router.get("/flush_cache")
    async def flush_cache(http: Request) -> Response:
        """Drops every cached prefix that no running request uses."""
        refuse_web_pages(http)
        await front.off_loop(engine.reset_prefix_cache)
        return Response("Cache flushed.\n", media_type="text/plain")

    @router.get("/health_generate")
    async def health_generate(http: Request) -> Response:
        """200 when one token has been generated."""
        refuse_web_pages(http)
        prompt = TokenPrompt(None, [tokenizer.bos_id or 0])
        give_back = front.admit(1)
        try:
            params = SamplingParams(max_tokens=1, temperature=0.0)
            job = await front.submit(lambda: [prompt], params, give_back, arrival=http.state.arrival, at_once=True)
        except BaseException:
            give_back()
            raise
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await job.finish()
        except TimeoutError:
            raise ApiError(503, f"no token was generated within {HEALTH_SECONDS:g} s") from None
        finally:
            job.cancel()
        return Response()

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration, as vLLM's endpoint and lm_eval's remote tokenizer have it."""
        template = tokenizer.chat_template
        info: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": front.max_model_len,
            "vocab_size": len(tokenizer),
            **tokenizer.special_texts,
        }
        return JsonResponse(info if template is None else {**info, "chat_template": template.source})

    return router
