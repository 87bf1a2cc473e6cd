"""/v1/embeddings, /rerank and /score: pooled hidden states of the model, and their cosine similarities."""

from __future__ import annotations

import base64
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from kvanta.engine.embedding import paired, similarity
from kvanta.outputs import PoolingRequestOutput
from kvanta.server.http.errors import JsonResponse
from kvanta.server.http.stream import CLIENT_GONE, JsonPieces, cancelled_with_client
from kvanta.server.jobs.embedding_job import EmbeddingRun
from kvanta.server.jobs.response import large_body
from kvanta.server.jobs.service import Service
from kvanta.server.requests import prompts
from kvanta.server.requests.pooling_protocol import (
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    check_number,
)
from kvanta.server.requests.translated import renamed_errors
from kvanta.text.prompts import TokenPrompt

_VALUES_AT_ONCE = 4096
"""Numbers of an answer that are computed and written on the event loop itself."""

Outputs = Sequence[PoolingRequestOutput]


class PoolingAnswer:
    """An answer for the log."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def usage(self) -> dict[str, Any]:
        """Usage as vLLM's: nothing is generated."""
        tokens = sum(len(output.prompt_token_ids) for output in self._outputs)
        cached = sum(output.num_cached_tokens for output in self._outputs)
        return {
            "prompt_tokens": tokens,
            "completion_tokens": 0,
            "total_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def add_pooling(app: FastAPI, service: Service) -> None:
    """Adds the endpoints to `app`."""
    model = service.names[0]

    @app.post("/v1/embeddings")
    async def embeddings(http: Request, request: EmbeddingRequest) -> Response:
        """Pooled hidden states of texts."""
        encode = _base64 if request.as_base64 else _floats

        def answer(outputs: Outputs) -> dict[str, Any]:
            data = [
                {"index": index, "object": "embedding", "embedding": encode(output)}
                for index, output in enumerate(outputs)
            ]
            return {**_head("embd", http, model), "object": "list", "data": data}

        given = await service.split(request.input, "input")
        check_number("input", given)
        return await pooled(service, http, request, {"input": given}, answer)

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(http: Request, request: RerankRequest) -> Response:
        """Documents by their similarity to a query."""
        query, documents = request.texts
        most = request.most_results
        with_documents = request.return_documents is not False

        def answer(outputs: Outputs) -> dict[str, Any]:
            scores = [similarity(*pair) for pair in paired(outputs, 1)]
            order = sorted(range(len(scores)), key=lambda index: -scores[index])[:most]
            results = [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": documents[index]}} if with_documents else {})
                for index in order
            ]
            head = _head("rerank", http, model)
            return {"id": head["id"], "model": model, "results": results}

        return await pooled(service, http, request, {"query": [query], "documents": documents}, answer)

    @app.post("/score")
    @app.post("/v1/score")
    async def score(http: Request, request: ScoreRequest) -> Response:
        """Similarities of pairs of texts, or of one text to several."""
        sides = request.sides
        number = len(next(iter(sides.values())))

        def answer(outputs: Outputs) -> dict[str, Any]:
            data = [
                {"index": index, "object": "score", "score": similarity(*pair)}
                for index, pair in enumerate(paired(outputs, number))
            ]
            return {**_head("score", http, model), "object": "list", "data": data}

        return await pooled(service, http, request, sides, answer)


async def pooled(
    service: Service,
    http: Request,
    request: PoolingRequest,
    texts: Mapping[str, list[Any]],
    answer: Callable[[Outputs], Any],
    *,
    with_usage: bool = True,
) -> Response:
    """Embeds the texts of each field; `answer` makes the body, to which the usage is added."""
    service.check_model(request.model)
    front = service.front
    params = request.pooling_params(front.loaded.default_pooling)
    fields = service.engine_fields(http, request)

    def encode() -> list[TokenPrompt]:
        entries: list[TokenPrompt] = []
        for name, given in texts.items():
            with renamed_errors({"prompt": name}):
                entries += prompts.encode(
                    given,
                    front.tokenizer,
                    front.max_model_len,
                    params,
                    add_special_tokens=request.add_special_tokens is not False,
                )
        return entries

    portion = min(sum(map(len, texts.values())), int(front.loaded.engine.config.max_num_seqs))
    give_back = front.admit(portion)
    try:
        entries = await service.read(http, encode)
        submit = functools.partial(front.submit_embeddings, params=params, arrival=http.state.arrival, **fields)
        run = EmbeddingRun(entries, submit)
        async with cancelled_with_client(http.receive, run):
            with renamed_errors({"prompt": next(iter(texts))}):
                outputs = await run.finish(portion)
            if run.cancelled:
                return Response(status_code=CLIENT_GONE)
    finally:
        give_back()
    http.state.answer = PoolingAnswer(outputs)

    def body() -> Any:
        found = answer(outputs)
        return {**found, "usage": http.state.answer.usage()} if with_usage else found

    if len(entries) * int(front.loaded.engine.info.hidden) <= _VALUES_AT_ONCE:
        return JsonResponse(body())
    return JsonPieces(await front.write(lambda: large_body(body())))


def _head(kind: str, http: Request, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{http.state.answer_id}", "created": int(time.time()), "model": model}


def _floats(output: PoolingRequestOutput) -> list[float]:
    values: list[float] = output.outputs.data.tolist()
    return values


def _base64(output: PoolingRequestOutput) -> str:
    return base64.b64encode(output.outputs.data.astype("<f4").tobytes()).decode()
