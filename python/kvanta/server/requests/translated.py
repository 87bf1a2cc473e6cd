"""Requests of other APIs as chats: /v1/responses and /v1/messages take the path of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvanta.errors import InputError
from kvanta.params.checks import one_line
from kvanta.server.http.errors import ApiError, api_error
from kvanta.server.http.hints import Hint, note_fields
from kvanta.server.http.hints import rename as rename_hints
from kvanta.server.requests.protocol import ChatRequest, CompletionRequest

AnyBody = TypeVar("AnyBody", ChatRequest, CompletionRequest)


def further_fields(request: BaseModel, refused: Collection[str], ignored: Mapping[str, Hint]) -> dict[str, Any]:
    """The undeclared fields of a request that a chat reads; those of `ignored` are hints."""
    extra = request.model_extra or {}
    note_fields(extra, ignored)
    return {name: value for name, value in extra.items() if name not in refused and name not in ignored}


def as_chat(fields: Mapping[str, Any]) -> ChatRequest:
    """The chat request with these fields. Raises ApiError for a field of a wrong type."""
    return _validated(ChatRequest, fields)


def as_completion(fields: Mapping[str, Any]) -> CompletionRequest:
    """The request for texts with these fields. Raises ApiError for a field of a wrong type."""
    return _validated(CompletionRequest, fields)


def _validated(kind: type[AnyBody], fields: Mapping[str, Any]) -> AnyBody:
    try:
        body: AnyBody = kind.model_validate(fields)
        return body
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ApiError(400, f"{name}: {first['msg']}, not {one_line(first.get('input'))}", param=name) from None


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a chat's fields tell the names that the client has used. `names`: the chat's -> the client's."""
    try:
        yield
    except (ApiError, InputError) as raised:
        error = api_error(raised)
        field = error.param or ""
        if field in names:
            error.param = names[field]
            if re.match(rf"{field}\b", error.detail):
                error.detail = names[field] + error.detail.removeprefix(field)
        raise error from None
    finally:
        rename_hints(names)
