"""POST /v1/responses: OpenAI's newer API for the same answers as those of chats."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response

from kvanta.parsers.answer import AnswerShape
from kvanta.server.http.errors import ApiError, JsonResponse
from kvanta.server.http.hints import note
from kvanta.server.jobs.answer_parts import AnswerPart, PartsResponse
from kvanta.server.jobs.generation_job import Delta, GenerationJob
from kvanta.server.jobs.service import Service
from kvanta.server.openai.logprobs import LogprobsWriter
from kvanta.server.openai.responses_request import FIELD_NAMES, ResponsesRequest
from kvanta.server.openai.stored_responses import ResponseStore, is_reference, named_items, page_of
from kvanta.server.requests.custom_tools import input_of
from kvanta.server.requests.protocol import ChatRequest
from kvanta.server.requests.request_fields import RESPONSES_REFUSED, check_refused
from kvanta.server.requests.translated import renamed_errors
from kvanta.text.tokenizer import Tokenizer

_BYTES_PER_ENTRY = 32
_ID_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def add_responses(app: FastAPI, service: Service) -> None:
    """Adds the endpoints; those of stored responses only where the server stores them."""
    store = ResponseStore(service.store_bytes) if service.store_bytes else None
    running: WeakValueDictionary[str, ItemsResponse] = WeakValueDictionary()

    @app.post("/v1/responses")
    async def responses(http: Request, request: ResponsesRequest) -> Response:
        """The assistant's answer, as a list of items."""
        check_refused(request.model_extra or {}, RESPONSES_REFUSED)
        owner = getattr(http.state, "api_key", "")
        await _follow(service, store, request, owner)
        with renamed_errors(FIELD_NAMES):
            chat = await service.read(http, lambda: request.chat(service.notes_unread))
            body = len(await http.body())

            def answer(name: str, job: GenerationJob, shape: AnswerShape) -> ItemsResponse:
                made = ItemsResponse(name, service.names[0], request, chat, job, service.front.tokenizer, shape, body)
                made.keep(None if request.store is False else store, owner)
                running[made.name] = made
                return made

            return await service.chat(http, chat, answer)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(http: Request, request: ResponsesRequest) -> Response:
        """The number of tokens of a response's prompt."""
        service.check_model(request.model)
        check_refused(request.model_extra or {}, RESPONSES_REFUSED)
        await _follow(service, store, request, getattr(http.state, "api_key", ""))
        with renamed_errors(FIELD_NAMES):
            count = await service.count_tokens(lambda: request.chat(service.notes_unread))
        return JsonResponse({"object": "response.input_tokens", "input_tokens": count})

    if store is not None:
        _add_stored(app, store, running)


async def _follow(service: Service, store: ResponseStore | None, request: ResponsesRequest, owner: str) -> None:
    """Gives a request the conversation that it continues. Raises ApiError."""
    if store is None and request.store:
        note("store", "answers are not kept (--store-responses)")
    name = request.previous_response_id
    references = isinstance(request.input, list) and any(map(is_reference, request.input))
    if name is None and not references:
        return
    if store is None:
        given, field = ("item_reference", "input") if name is None else ("previous_response_id", "previous_response_id")
        message = f"{given} is not supported: answers are not kept (--store-responses); send the earlier items"
        raise ApiError(400, message, param=field)
    if references:
        request.input = await service.front.off_loop(lambda: store.resolved(request.input, owner))
    if name is not None:
        request.follow(await service.front.off_loop(lambda: store.history(name, owner)))


def _add_stored(app: FastAPI, store: ResponseStore, running: WeakValueDictionary[str, ItemsResponse]) -> None:
    def owner_of(http: Request) -> str:
        return getattr(http.state, "api_key", "")

    @app.get("/v1/responses/{response_id}")
    async def retrieve(http: Request, response_id: str) -> Response:
        """A stored response."""
        return Response(store.get(response_id, owner_of(http)).response, media_type="application/json")

    @app.delete("/v1/responses/{response_id}")
    async def delete(http: Request, response_id: str) -> Response:
        """Deletes a stored response; those that continue it can no longer be continued."""
        store.delete(response_id, owner_of(http))
        return JsonResponse({"id": response_id, "object": "response.deleted", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        http: Request, response_id: str, limit: int = 20, order: str = "desc", after: str | None = None
    ) -> Response:
        """The items of the request."""
        entry = store.get(response_id, owner_of(http))
        return JsonResponse(page_of(json.loads(entry.items), limit, order, after))

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(http: Request, response_id: str) -> Response:
        """Ends a response that is generated now; its stream ends, and it is not stored."""
        found = running.get(response_id)
        if found is None or found.owner != owner_of(http) or not found.cancel():
            store.get(response_id, owner_of(http))
            raise ApiError(400, f"the response {response_id[:100]!r} is finished", param="response_id")
        return JsonResponse({"id": response_id, "object": "response", "status": "cancelled"})


class ItemsResponse(PartsResponse):
    """Items: reasoning, messages, calls of functions."""

    def __init__(
        self,
        request_id: str,
        model: str,
        request: ResponsesRequest,
        chat: ChatRequest,
        job: GenerationJob,
        tokenizer: Tokenizer,
        shape: AnswerShape,
        body_bytes: int,
    ) -> None:
        """`chat`: the request as a chat. `body_bytes`: of the request, whose tools and instructions are repeated."""
        super().__init__(chat, job, shape)
        self._echoed_entries = body_bytes // _BYTES_PER_ENTRY
        self._request_id = request_id
        self._tool_kinds = request.tool_kinds
        self._events_sent = 0
        self._items: list[dict[str, Any]] = []
        self._wants_logprobs = request.has_logprobs
        self._logprobs = LogprobsWriter(tokenizer, None if chat.logprob_token_ids else request.top_logprobs or 0)
        params = job.generations[0].params
        reasoning = {"effort": (request.reasoning or {}).get("effort"), "summary": None}
        self.owner = ""
        """Digest of the API key that made the request."""
        self._store: ResponseStore | None = None
        self._given = request.input
        self._previous = request.previous_response_id or ""
        self._head = {
            "id": self.name,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "error": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": reasoning,
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **(request.text or {})},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    @property
    def name(self) -> str:
        """The response's id."""
        return f"resp_{self._request_id}"

    def keep(self, store: ResponseStore | None, owner: str) -> None:
        """Sets where the finished response is kept; None: nowhere."""
        self._store, self.owner = store, owner
        self._head["store"] = store is not None

    def cancel(self) -> bool:
        """Ends the work; False if it has ended."""
        if self._job.cancelled or all(output.finished for output in self._job.outputs):
            return False
        self._job.cancel()
        return True

    def whole(self) -> dict[str, Any]:
        """When the job is finished."""
        return self._finished(self._read_whole())

    def _finished(self, delta: Delta) -> dict[str, Any]:
        length = delta.finish_reason == "length"
        response = {
            **self._response("incomplete" if length else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "completed_at": None if length else int(time.time()),
            "usage": self._items_usage(),
        }
        if self._store is not None and not self._store.put(
            response, named_items(self._given), self._previous, self.owner
        ):
            response["store"] = False  # larger than all that may be kept
        return response

    def _response(self, status: str) -> dict[str, Any]:
        fields = {"status": status, "output": list(self._items), "incomplete_details": None, "usage": None}
        return {**self._head, **fields, "completed_at": None}

    def _items_usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events_sent += 1
        return {"type": f"response.{kind}", "sequence_number": self._events_sent - 1, **fields}

    def _begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("created", response=self._response("in_progress"))
        yield self._event("in_progress", response=self._response("in_progress"))

    def _opened(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        yield self._event("output_item.added", output_index=part.index, item=self._item(part, "in_progress"))
        if part.kind != "call":
            yield self._event("content_part.added", **self._place(part), part=self._content(part))

    def _grown(self, part: AnswerPart, text: str, tokens: slice) -> Iterator[dict[str, Any]]:
        if part.kind == "text":
            logprobs = self._entries_of(tokens)
            yield self._event("output_text.delta", **self._place(part), delta=text, logprobs=logprobs)
        elif part.kind == "reasoning":
            yield self._event("reasoning_text.delta", **self._place(part), delta=text)
        elif not self._is_custom(part):  # whose text is known when its JSON is complete
            yield self._event("function_call_arguments.delta", **self._place(part), delta=text)

    def _closed(self, part: AnswerPart, finish_reason: str | None) -> Iterator[dict[str, Any]]:
        item = self._item(part, "incomplete" if finish_reason == "length" else "completed")
        self._items.append(item)
        place = self._place(part)
        if part.kind == "call" and self._is_custom(part):
            text = input_of(part.text)
            yield self._event("custom_tool_call_input.delta", **place, delta=text)
            yield self._event("custom_tool_call_input.done", **place, input=text)
        elif part.kind == "call":
            yield self._event("function_call_arguments.done", **place, name=part.name, arguments=part.text)
        else:
            (content,) = item["content"] or [self._content(part)]
            if part.kind == "text":
                yield self._event("output_text.done", **place, text=part.text, logprobs=content["logprobs"])
            else:
                yield self._event("reasoning_text.done", **place, text=part.text)
            yield self._event("content_part.done", **place, part=content)
        yield self._event("output_item.done", output_index=part.index, item=item)

    def _end(self, delta: Delta) -> Iterator[dict[str, Any]]:
        response = self._finished(delta)
        yield self._event(response["status"], response=response)

    def _failed(self, error: ApiError) -> dict[str, Any]:
        code = _ERROR_CODES.get(error.status_code, "server_error")
        response = {**self._response("failed"), "error": {"code": code, "message": error.detail}}
        return self._event("failed", response=response)

    def _place(self, part: AnswerPart) -> dict[str, Any]:
        place = {"item_id": self._item_id(part), "output_index": part.index}
        return place if part.kind == "call" else {**place, "content_index": 0}

    def _is_custom(self, part: AnswerPart) -> bool:
        return self._tool_kinds.get(part.name, {}).get("type") == "custom"

    def _item_id(self, part: AnswerPart) -> str:
        return f"{_ID_PREFIXES[part.kind]}{self._request_id}_{part.index}"

    def _item(self, part: AnswerPart, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(part), "status": status}
        if part.kind == "call":
            call = {"call_id": part.call_id, "name": part.name}
            if namespace := self._tool_kinds.get(part.name, {}).get("namespace"):
                call["namespace"] = namespace
            if self._is_custom(part):
                return {"type": "custom_tool_call", **head, **call, "input": input_of(part.text)}
            return {"type": "function_call", **head, **call, "arguments": part.text}
        content = [] if status == "in_progress" else [self._content(part)]
        if part.kind == "reasoning":
            return {"type": "reasoning", **head, "summary": [], "content": content}
        return {"type": "message", **head, "role": "assistant", "content": content}

    def _content(self, part: AnswerPart) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "reasoning_text", "text": part.text}
        logprobs = self._entries_of(slice(part.first_token, part.end_token))
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}

    def _entries_of(self, tokens: slice) -> list[dict[str, Any]]:
        """Log-probabilities of some tokens."""
        if not self._wants_logprobs:
            return []
        output = self._job.outputs[0]
        entries: list[dict[str, Any]] = self._logprobs.chat(output.token_ids[tokens], (output.logprobs or [])[tokens])[
            "content"
        ]
        return entries
