"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API for the same answers as those of chats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response

from kvanta.parsers.answer import AnswerShape
from kvanta.parsers.lenient_json import JSON_READER
from kvanta.server.anthropic.messages_request import FIELD_NAMES, CountTokensRequest, MessagesRequest
from kvanta.server.http.errors import MESSAGES_PATH, ApiError, JsonResponse
from kvanta.server.jobs.answer_parts import AnswerPart, PartsResponse
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.response import named_event
from kvanta.server.jobs.service import ANY_NAME, Service
from kvanta.server.requests.protocol import ChatRequest
from kvanta.server.requests.request_fields import MESSAGES_REFUSED, check_refused
from kvanta.server.requests.translated import renamed_errors


def add_messages(app: FastAPI, service: Service) -> None:
    """Adds the endpoints."""
    front = service.front

    @app.post(MESSAGES_PATH)
    async def messages(http: Request, request: MessagesRequest) -> Response:
        """The assistant's answer, as a list of content blocks."""
        check_refused(request.model_extra or {}, MESSAGES_REFUSED)
        with renamed_errors(FIELD_NAMES):
            chat = await service.read(http, lambda: request.chat(service.parsers, service.notes_unread))
            ttl = request.cache_ttl()
            if front.max_cache_ttl > 0 and chat.cache_ttl is None:
                chat.cache_ttl = ttl
            return await service.chat(
                http, chat, lambda name, job, shape: BlocksResponse(name, service.names[0], chat, job, shape)
            )

    @app.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(request: CountTokensRequest) -> Response:
        """The number of tokens of a message's prompt."""
        service.check_model(request.model)
        check_refused(request.model_extra or {}, MESSAGES_REFUSED)
        with renamed_errors(FIELD_NAMES):
            return JsonResponse(
                {
                    "input_tokens": await service.count_tokens(
                        lambda: request.chat(service.parsers, service.notes_unread)
                    )
                }
            )


def wants_anthropic(http: Request) -> bool:
    """True for clients of Anthropic's API: /v1/models is a path of OpenAI's, too, with another answer."""
    return "anthropic-version" in http.headers


def anthropic_models(service: Service, created: int) -> dict[str, Any]:
    """GET /v1/models as Anthropic's API answers it."""
    cards = [anthropic_model(service, name, created) for name in service.names if name != ANY_NAME]
    return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}


def anthropic_model(service: Service, name: str, created: int) -> dict[str, Any]:
    """One of its models."""
    longest = service.front.max_model_len
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
    }


class BlocksResponse(PartsResponse):
    """Blocks: thinking, text, uses of tools."""

    ping = named_event({"type": "ping"})

    def __init__(
        self, request_id: str, model: str, request: ChatRequest, job: GenerationJob, shape: AnswerShape
    ) -> None:
        super().__init__(request, job, shape)
        self._max_tokens = request.max_tokens
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}

    def whole(self) -> dict[str, Any]:
        """When the job is finished."""
        delta = self._read_whole()
        blocks = [_block(part) for part in self._parts]
        return {**self._head, "content": blocks, **self._stop(delta), "usage": self._blocks_usage()}

    def _stop(self, delta: Delta) -> dict[str, Any]:
        sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.finish_reason == "length":
            full = delta.end < (self._max_tokens or 0)
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif sequence is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _blocks_usage(self) -> dict[str, Any]:
        """Usage as Anthropic counts it: cached and uncached prompt tokens are separate."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _begin(self) -> Iterator[dict[str, Any]]:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._head, **nothing, "usage": self._blocks_usage()}}

    def _opened(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}

    def _grown(self, part: AnswerPart, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        if part.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif part.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_delta", "index": part.index, "delta": delta}

    def _closed(self, part: AnswerPart, finish_reason: str | None) -> Iterator[dict[str, Any]]:
        yield {"type": "content_block_stop", "index": part.index}

    def _end(self, delta: Delta) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._stop(delta), "usage": self._blocks_usage()}
        yield {"type": "message_stop"}

    def _failed(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body()


def _block(part: AnswerPart) -> dict[str, Any]:
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _arguments(part.text)}


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; none where max_tokens has cut them off."""
    try:
        arguments = JSON_READER.decode(text)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}
