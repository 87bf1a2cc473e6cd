"""Errors as OpenAI's clients know them, {"error": {"message", "type", "param", "code"}}, or Anthropic's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvanta.errors import InputError
from kvanta.files.json_file import finite_values

MESSAGES_PATH = "/v1/messages"
"""Anthropic's endpoints, whose errors have Anthropic's shape."""
OLLAMA_PATH = "/api/"
"""Ollama's, whose errors are one text."""

THREAD_NOT_FOUND = "thread_not_found"
"""Code by which Anthropic's clients know that they must send the whole conversation."""
LLAMA_PATHS = frozenset(
    ("/completion", "/completions", "/infill", "/embedding", "/embeddings", "/apply-template", "/props", "/slots")
)
"""Those of llama.cpp alone, whose errors have the status as their code."""

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_LLAMA_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

# Quoted texts, which stay unchanged, and Python's names of JSON's values.
_LITERALS = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'|(?<!\w)"(?:[^"\\]|\\.)*"|\b(?:None|True|False)\b""")
_JSON_NAMES = {"None": "null", "True": "true", "False": "false"}


def in_json(message: str) -> str:
    """A message of the library with null, true and false, as a client's JSON has them."""
    return _LITERALS.sub(lambda found: _JSON_NAMES.get(found[0], found[0]), message)


class ApiError(HTTPException):
    """Becomes an answer with `status` and OpenAI's body. The message says null where Python says None."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        prompt_tokens: int = 0,
        max_model_len: int = 0,
    ) -> None:
        """`prompt_tokens`, `max_model_len`: for a prompt that is longer than the context, at least and at most."""
        super().__init__(status, in_json(message), headers)
        self.code = code
        self.param = param
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, or of an event in a stream that has already begun."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """The same in Anthropic's shape."""
        default = "api_error" if self.status_code >= 500 else "invalid_request_error"
        error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(self.status_code, default), "message": self.detail}
        if self.code == THREAD_NOT_FOUND:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}

    def llama_body(self) -> dict[str, Any]:
        """The same in llama.cpp's shape."""
        default = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = _LLAMA_TYPES.get(self.status_code, default)
        if self.code == "context_length_exceeded":
            kind = "exceed_context_size_error"
        error: dict[str, Any] = {"code": self.status_code, "message": self.detail, "type": kind}
        if self.max_model_len:
            error |= {"n_prompt_tokens": self.prompt_tokens, "n_ctx": self.max_model_len}
        return {"error": error}


def shutting_down() -> ApiError:
    """Error of requests that arrive or have not ended when the server stops."""
    return ApiError(503, "the server is shutting down", headers={"Retry-After": "10"})


def api_error(error: Exception) -> ApiError:
    """The ApiError for an error of the library: 400 for the client's fault, 500 for ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=error.field)
    return ApiError(500, str(error) or type(error).__name__)


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; a lone surrogate, which UTF-8 cannot encode, becomes "?", and numbers that are not finite null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, an integer of more than 64 bits, a key that is no text, very deep nesting
        pass
    try:
        return _encode(value)
    except ValueError:  # a request's 1e999, which an answer repeats
        return _encode(finite_values(value))


def _encode(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


class JsonResponse(Response):
    """Any JSON value."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return json_bytes(content)


def error_response(error: ApiError, path: str) -> JsonResponse:
    """The whole answer, in the shape that clients of the path know."""
    if path.startswith(OLLAMA_PATH):
        body: dict[str, Any] = {"error": error.detail}
    elif path in LLAMA_PATHS:
        body = error.llama_body()
    else:
        body = error.anthropic_body() if path.startswith(MESSAGES_PATH) else error.body()
    return JsonResponse(body, error.status_code, error.headers)
