"""State that the endpoints share: engine, model names, limits; and the path from a request to its texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kvanta.constraints.structured_output import TextShape
from kvanta.errors import InputError
from kvanta.params.sampling_params import SamplingParams
from kvanta.parsers.answer import AnswerParsers, AnswerShape, ContinuationShape
from kvanta.parsers.written_calls import SYNTAXES
from kvanta.server.http.errors import ApiError
from kvanta.server.http.hosts import AllowedHosts
from kvanta.server.http.stream import CLIENT_GONE, EventStream, JsonPieces, cancelled_with_client
from kvanta.server.jobs.async_llm import AsyncLLM
from kvanta.server.jobs.generation_job import GenerationJob
from kvanta.server.jobs.response import GenerationResponse
from kvanta.server.requests import prompts
from kvanta.server.requests.protocol import ChatRequest, QueueFields, SamplingFields
from kvanta.server.requests.structured import note_loosened
from kvanta.text.prompts import TokenPrompt

Result = TypeVar("Result")

ANY_NAME = "*"
"""Among the model's names: clients may use every name, as agents do that name several models of a vendor."""
LATEST = ":latest"
_AT_ONCE = 4096
"""Bytes of a body that is turned into tokens at once: to hand it to another thread would take longer."""

_SPLIT_AT_ONCE = 4096
"""Prompts, or token ids of one, that are looked at on the event loop."""

_TEXTS_AT_ONCE = 16


@dataclass
class Service:
    """One model that is served over HTTP."""

    front: AsyncLLM
    names: list[str]
    """Model names that clients may use; answers carry the first."""
    max_logprobs: int = 20
    api_keys: list[str] = field(default_factory=list)
    max_body_bytes: int = 4 << 20
    hosts: AllowedHosts | None = None
    """Names under which clients may call the server; None: any."""
    priorities: bool = False
    """Requests may have a priority."""
    fair_by: str = "none"
    """Whom the engine serves equally: none, user or api-key."""
    log_requests: bool = True
    unlogged_paths: list[str] = field(default_factory=list)
    """Paths without a line per request, with everything below them."""
    max_headers: int = 256
    """Number of headers that a request may have."""
    stream_ping_seconds: float = 15.0
    """Time without an event after which a stream sends a ping; 0: never."""
    has_docs: bool = True
    """The server answers /openapi.json."""
    store_bytes: int = 0
    """Bytes of responses that are kept for `previous_response_id`; 0: none."""
    notes_unread: bool = False
    """Pictures and other parts of messages that are not text become a note in the text; else they are refused."""
    tool_call_parser: str = ""
    """A name of tool_calls.PARSERS; empty: calls that were not forced stay text."""
    reasoning_parser: str = ""
    """A name of reasoning.FORMATS; empty: reasoning stays text, unless the model writes in channels."""

    def __post_init__(self) -> None:
        """Functions are written in the syntax that is searched for calls."""
        if parser := self.parsers.tool_parser:
            self.front.tokenizer.tool_syntax = SYNTAXES[parser]

    @functools.cached_property
    def parsers(self) -> AnswerParsers:
        """The parsers of chats."""
        return AnswerParsers(self.front.tokenizer, self.tool_call_parser, self.reasoning_parser)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for an unknown model. A name without a tag has the tag `latest`, as Ollama has it."""
        known_names = {each.removesuffix(LATEST) for each in self.names}
        if name is not None and name.removesuffix(LATEST) not in known_names and ANY_NAME not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"there is no model {name[:100]!r} here; known: {known}", code="model_not_found", param="model"
            )

    async def read(self, http: Request, make: Callable[[], Result]) -> Result:
        """Result of `make`, which reads the fields of a request: on another thread where they are large."""
        return make() if len(await http.body()) <= _AT_ONCE else await self.front.off_loop(make)

    def engine_fields(self, http: Request, request: QueueFields) -> dict[str, Any]:
        """Arguments of the engine in addition to the parameters. Raises ApiError or InputError."""
        fields = request.engine_fields()
        if fields["priority"] != 0 and not self.priorities:
            message = f"priority needs a server with --scheduling-policy priority, got {fields['priority']}"
            raise ApiError(400, message, param="priority")
        key = getattr(http.state, "api_key", "")
        if self.fair_by == "user":  # those of one key have nothing to do with those of another
            fields["user"] = f"{key}/{request.end_user}" if key else request.end_user
        elif self.fair_by == "api-key":
            fields["user"] = key
        return fields

    async def split(self, given: Any, name: str = "prompt") -> list[Any]:
        """The prompts of the field `name`, as prompts.split has them."""
        split = functools.partial(prompts.split, given, name)
        large = isinstance(given, list) and len(given) > _SPLIT_AT_ONCE
        return await self.front.off_loop(split) if large else split()

    async def texts(
        self,
        http: Request,
        request: SamplingFields,
        params: SamplingParams,
        count: int,
        encode: Callable[[], list[TokenPrompt]],
        answer: Callable[[str, GenerationJob], GenerationResponse],
        shape: TextShape | None = None,
    ) -> Response:
        """`encode` makes `count` prompts; `answer` gets the request's id and job."""
        fields = self.engine_fields(http, request)
        give_back = self.front.admit(count * params.n)
        at_once = len(await http.body()) <= _AT_ONCE
        try:
            arrival = http.state.arrival
            job = await self.front.submit(
                encode, params, give_back, arrival=arrival, at_once=at_once, shape=shape, **fields
            )
        except BaseException as error:
            give_back()
            given = params.structured_outputs
            if isinstance(error, InputError) and given is not None and error.field == given.kind:
                field = request.constraint_field
                raise ApiError(400, f"{field}: {error}", param=field) from None
            raise
        try:
            make = functools.partial(answer, http.state.answer_id, job)  # a parser for each text
            writer = make() if at_once and params.n <= _TEXTS_AT_ONCE else await self.front.write(make)
        except BaseException:
            job.cancel()
            raise
        http.state.answer = writer
        if request.stream:
            return EventStream(writer.events(self.front.write, self.stream_ping_seconds), job, writer.media_type)
        async with cancelled_with_client(http.receive, job):
            try:
                await job.finish()
                if job.cancelled:
                    return Response(status_code=CLIENT_GONE)
                return JsonPieces(await writer.body(self.front.write), writer.headers())
            finally:
                await writer.discard(self.front.write)

    async def completion(
        self,
        http: Request,
        request: SamplingFields,
        params: SamplingParams,
        given: Any,
        answer: Callable[[str, GenerationJob], GenerationResponse],
        *,
        add_special_tokens: bool = True,
    ) -> Response:
        """The texts that follow `given`, a request's prompts, whichever endpoint has taken it."""
        front = self.front
        entries = await self.split(given)
        encode = functools.partial(
            prompts.encode,
            entries,
            front.tokenizer,
            front.max_model_len,
            params,
            add_special_tokens=add_special_tokens,
        )
        shape = ContinuationShape(self.parsers)
        return await self.texts(http, request, params, len(entries), encode, answer, shape)

    async def chat(
        self,
        http: Request,
        request: ChatRequest,
        answer: Callable[[str, GenerationJob, AnswerShape], GenerationResponse],
    ) -> Response:
        """The answer to a conversation, whichever endpoint has taken it."""
        self.check_model(request.model)
        front = self.front
        defaults = front.loaded.default_sampling
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens

        def read() -> tuple[SamplingParams, AnswerShape]:
            params = request.sampling_params(
                max_tokens=defaults.get("max_tokens") if max_tokens is None else max_tokens,
                max_logprobs=self.max_logprobs,
                logprobs=request.requested_logprobs,
                defaults=defaults,
            )
            shape = AnswerShape.read(
                self.parsers,
                request.functions,
                prompts.template_variables(request, front.tokenizer),
                bool(request.continue_final_message),
                params.structured_outputs,
            )
            if shape.structured_outputs is not None and shape.structured_outputs is not params.structured_outputs:
                note_loosened(shape.structured_outputs, "tools")
                params.structured_outputs = shape.structured_outputs
            return params, shape

        params, shape = await self.read(http, read)
        params.stop_token_ids = [*(params.stop_token_ids or ()), *shape.stop_tokens] or None
        return await self.texts(
            http,
            request,
            params,
            1,
            lambda: [prompts.chat_prompt(request, front.tokenizer, front.max_model_len, params, self.notes_unread)],
            lambda name, job: answer(name, job, shape),
            shape,
        )

    async def count_tokens(self, read: Callable[[], ChatRequest]) -> int:
        """Tokens of the prompt of a conversation, which `read` makes; both on another thread."""
        front = self.front

        def count() -> int:
            text = prompts.chat_text(read(), front.tokenizer, self.notes_unread)
            prompts.check_length(text, front.tokenizer, front.max_model_len)
            return len(front.tokenizer.encode(text, add_special_tokens=False))

        return await front.off_loop(count)

    def model_card(self, name: str, created: int) -> dict[str, Any]:
        """The model, as /v1/models lists it."""
        stats = self.front.loaded.stats()
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "kvanta",
            "root": self.front.loaded.name,
            "parent": None,
            "max_model_len": self.front.max_model_len,
            "kv_cache_dtype": stats["kv_cache_dtype"],
        }
