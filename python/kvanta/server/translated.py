"""Requests of other APIs as chats: /v1/responses and /v1/messages take the path of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from kvanta.errors import InputError
from kvanta.server.errors import ApiError
from kvanta.server.protocol import ChatRequest, field_of
from kvanta.values import one_line


def further_fields(request: BaseModel, refused: Collection[str], ignored: Collection[str]) -> dict[str, Any]:
    """The undeclared fields of a request that a chat reads."""
    extra = request.model_extra or {}
    return {name: value for name, value in extra.items() if name not in refused and name not in ignored}


def as_chat(fields: Mapping[str, Any]) -> ChatRequest:
    """The chat request with these fields. Raises ApiError for a field of a wrong type."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ApiError(400, f"{name}: {first['msg']}, not {one_line(first.get('input'))}", param=name) from None


@contextmanager
def renamed_errors(request: BaseModel, names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a chat's fields tell the names that the client has used. `names`: the chat's -> the client's."""
    try:
        yield
    except ApiError as error:
        error.detail = _renamed(error.detail, names)
        error.param = names.get(error.param or "", error.param)
        raise
    except InputError as error:
        message = str(error)
        word = re.match(r"[a-z_]*", message)
        field = word[0] if word and word[0] in type(request).model_fields else field_of(message)
        raise ApiError(400, _renamed(message, names), param=names.get(field or "", field)) from None


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """The message, whose first words name the field."""
    begin, colon, rest = message.partition(" ")
    word = begin.rstrip(":")
    return names[word] + begin[len(word) :] + colon + rest if word in names else message
