"""/openapi.json: what FastAPI finds by itself, with the answers, the errors and the keys."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from kvanta.server.http.access import OPEN_PATHS
from kvanta.server.http.errors import LLAMA_PATHS, MESSAGES_PATH, OLLAMA_PATH

_TEXT = {"type": "string"}
_INTEGER = {"type": "integer"}
_NUMBER = {"type": "number"}
_BOOLEAN = {"type": "boolean"}
_OBJECT: dict[str, Any] = {"type": "object"}
_ERROR = {"$ref": "#/components/schemas/Error"}
_ANTHROPIC_ERROR = {"$ref": "#/components/schemas/AnthropicError"}
_OLLAMA_ERROR = {"$ref": "#/components/schemas/OllamaError"}
_LLAMA_ERROR = {"$ref": "#/components/schemas/LlamaError"}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(*, optional: tuple[str, ...] = (), **properties: dict[str, Any]) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_USAGE = _object(
    prompt_tokens=_INTEGER,
    completion_tokens=_INTEGER,
    total_tokens=_INTEGER,
    prompt_tokens_details=_object(cached_tokens=_INTEGER),
    completion_tokens_details=_object(
        reasoning_tokens=_INTEGER,
        accepted_prediction_tokens=_INTEGER,
        rejected_prediction_tokens=_INTEGER,
        optional=("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"),
    ),
    kv_cache=_object(
        levels=_list(_TEXT),
        choices=_list(_object(pages=_list(_INTEGER), events=_list(_OBJECT), replayable=_BOOLEAN)),
    ),
    optional=("completion_tokens_details", "kv_cache"),
)
_END = {"finish_reason": _or_null(_TEXT), "stop_reason": _or_null({"type": ["string", "integer"]})}
_MESSAGE = _object(
    role=_TEXT,
    content=_or_null(_TEXT),
    reasoning_content=_or_null(_TEXT),
    reasoning=_or_null(_TEXT),
    tool_calls=_list(_OBJECT),
    optional=("reasoning_content", "reasoning", "tool_calls"),
)


_TOKENS = {"token_ids": _list(_INTEGER), "prompt_token_ids": _list(_INTEGER), "prompt_logprobs": _list(_OBJECT)}


def _answer(kind: str, **choice: dict[str, Any]) -> dict[str, Any]:
    entry = _object(index=_INTEGER, logprobs=_or_null(_OBJECT), **choice, **_END, **_TOKENS, optional=tuple(_TOKENS))
    head = {"id": _TEXT, "object": {"const": kind}, "created": _INTEGER, "model": _TEXT}
    extra = {name: schema for name, schema in _TOKENS.items() if name.startswith("prompt")}
    return _object(**head, choices=_list(entry), usage=_USAGE, **extra, optional=tuple(extra))


_EVENT = _object(data=_TEXT, event=_TEXT, optional=("event",))
"""One event of a stream; OpenAPI 3.1 has no word for the whole."""
_GENERATED = _object(text=_TEXT, output_ids=_list(_INTEGER), meta_info=_OBJECT)
_CARD = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_TEXT,
    root=_TEXT,
    parent={"type": "null"},
    max_model_len=_INTEGER,
    kv_cache_dtype=_TEXT,
)
_RESPONSE_FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("id", "model", "status", "service_tier", "truncation"), _TEXT),
    **dict.fromkeys(("instructions", "prompt_cache_key", "safety_identifier", "user"), _or_null(_TEXT)),
    **dict.fromkeys(("created_at", "top_logprobs"), _INTEGER),
    **dict.fromkeys(("completed_at", "max_output_tokens"), _or_null(_INTEGER)),
    **dict.fromkeys(("parallel_tool_calls", "background", "store"), _BOOLEAN),
    **dict.fromkeys(("temperature", "top_p"), _NUMBER),
    **dict.fromkeys(("metadata", "reasoning", "text"), _OBJECT),
    **dict.fromkeys(("output", "tools"), _list(_OBJECT)),
    **dict.fromkeys(("error", "incomplete_details"), _or_null(_OBJECT)),
    "object": {"const": "response"},
    "previous_response_id": _or_null(_TEXT),
    "tool_choice": {"type": ["string", "object"]},
    "usage": _object(
        input_tokens=_INTEGER,
        input_tokens_details=_object(cached_tokens=_INTEGER, cache_write_tokens=_INTEGER),
        output_tokens=_INTEGER,
        output_tokens_details=_object(reasoning_tokens=_INTEGER),
        total_tokens=_INTEGER,
    ),
}
_ANTHROPIC_MESSAGE = _object(
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(_OBJECT),
    stop_reason=_TEXT,
    stop_sequence=_or_null(_TEXT),
    usage=_object(
        input_tokens=_INTEGER,
        cache_creation_input_tokens=_INTEGER,
        cache_read_input_tokens=_INTEGER,
        output_tokens=_INTEGER,
    ),
)
_EMBEDDINGS = _list(
    _object(index=_INTEGER, object={"const": "embedding"}, embedding={"anyOf": [_list(_NUMBER), _TEXT]})
)
_SCORES = _object(
    id=_TEXT,
    created=_INTEGER,
    model=_TEXT,
    object={"const": "list"},
    data=_list(_object(index=_INTEGER, object={"const": "score"}, score=_NUMBER)),
    usage=_USAGE,
)
_RANKS = _object(
    id=_TEXT,
    model=_TEXT,
    results=_list(
        _object(index=_INTEGER, relevance_score=_NUMBER, document=_object(text=_TEXT), optional=("document",))
    ),
    usage=_USAGE,
)
_POOLED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": _object(
        id=_TEXT, created=_INTEGER, model=_TEXT, object={"const": "list"}, data=_EMBEDDINGS, usage=_USAGE
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), _RANKS),
    **dict.fromkeys(("/score", "/v1/score"), _SCORES),
}
ANSWERS: dict[str, dict[str, Any]] = {
    **_POOLED,
    "/v1/completions": _answer("text_completion", text=_TEXT),
    "/v1/chat/completions": _answer("chat.completion", message=_MESSAGE),
    "/v1/responses": _object(optional=(), **_RESPONSE_FIELDS),
    "/v1/responses/input_tokens": _object(object={"const": "response.input_tokens"}, input_tokens=_INTEGER),
    MESSAGES_PATH: _ANTHROPIC_MESSAGE,
    f"{MESSAGES_PATH}/count_tokens": _object(input_tokens=_INTEGER),
    "/v1/models": _object(object={"const": "list"}, data=_list(_CARD)),
    "/v1/models/{name}": _CARD,
    "/tokenize": _object(
        count=_INTEGER,
        max_model_len=_INTEGER,
        tokens=_list(_INTEGER),
        token_strs=_list(_TEXT),
        optional=("token_strs",),
    ),
    "/detokenize": _object(prompt=_TEXT, content=_TEXT),
    "/apply-template": _object(prompt=_TEXT),
    "/completion": {"anyOf": [_OBJECT, _list(_OBJECT)]},
    "/infill": _OBJECT,
    "/embedding": _list(_OBJECT),
    "/props": _OBJECT,
    "/slots": _list(_OBJECT),
    "/health": _object(status=_TEXT),
    "/generate": {"anyOf": [_GENERATED, _list(_GENERATED)]},
    "/model_info": _OBJECT,
    "/server_info": _OBJECT,
    "/tokenizer_info": _OBJECT,
    "/version": _object(version=_TEXT),
    "/load": _object(server_load=_INTEGER),
}
"""Schemas of whole answers in JSON, by path."""
_LINES = ("/api/chat", "/api/generate", "/api/pull")
"""Streams of objects, a line each."""
_STREAMS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES_PATH, "/generate", "/completion", "/infill"),
)
ERRORS: dict[int, str] = {
    400: "an invalid field or body",
    401: "the key is missing or wrong",
    403: "not under this host name, or not for web pages",
    404: "no such model",
    408: "the body came too slowly",
    413: "the body is too large",
    429: "the queue is full",
    431: "the header is too large",
    500: "an internal error",
    501: "not possible with this model",
    503: "the server is shutting down",
    504: "the request took longer than --request-timeout",
}
_OF_EVERY_REQUEST = (403, 431)
_OF_BODIES = (400, 404, 408, 413)
_OF_TEXTS = (429, 500, 503, 504)


def describe(app: FastAPI, *, needs_key: bool) -> None:
    """Completes the document that `app` serves. `needs_key`: the server has API keys."""
    automatic = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = automatic()
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which are never sent
                schemas.pop(name, None)
            fields = _object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))
            schemas["Error"] = _object(error=fields)
            schemas["LlamaError"] = _object(error=_object(code=_INTEGER, message=_TEXT, type=_TEXT))
            schemas["OllamaError"] = _object(error=_TEXT)
            schemas["AnthropicError"] = _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            }
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _complete(path, operation, needs_key=needs_key)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    if app.openapi_url:
        openapi()  # now, because it takes some 50 ms


def _complete(path: str, operation: dict[str, Any], *, needs_key: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    statuses = list(_OF_EVERY_REQUEST)
    keyed = path not in OPEN_PATHS
    if keyed:
        statuses.append(401)
    operation["security"] = [{"bearer": []}, {"header": []}] if keyed and needs_key else []
    if "requestBody" in operation:
        statuses += _OF_BODIES
    if path in _STREAMS or path in _POOLED or path in (*_LINES, "/api/embed", "/api/embeddings", "/embedding"):
        statuses += _OF_TEXTS
    elif path.startswith(("/v1/models/", "/v1/responses/{")):
        statuses += [400, 404]
    elif path in ("/health", "/health_generate"):
        statuses.append(503)
    if path == "/infill":
        statuses.append(501)
    for status in sorted(set(statuses)):
        shape = _ANTHROPIC_ERROR if path.startswith(MESSAGES_PATH) else _ERROR
        if path.startswith(OLLAMA_PATH):
            shape = _OLLAMA_ERROR
        elif path in LLAMA_PATHS:
            shape = _LLAMA_ERROR
        content = {"application/json": {"schema": shape}}
        responses[str(status)] = {"description": ERRORS[status], "content": content}
    content = {"application/json": {"schema": ANSWERS[path]}} if path in ANSWERS else {}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": _EVENT}
    elif path in _LINES:
        content = {"application/json": {"schema": _OBJECT}, "application/x-ndjson": {"schema": _TEXT}}
    elif path == "/metrics":
        content["text/plain"] = {"schema": _TEXT}
    responses["200"] = {"description": "success", **({"content": content} if content else {})}
