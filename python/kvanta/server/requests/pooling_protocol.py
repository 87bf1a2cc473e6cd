"""Bodies of /v1/embeddings, /rerank and /score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema, create_model

from kvanta.params.checks import one_line, whole_number
from kvanta.params.pooling_params import PoolingParams
from kvanta.server.http.errors import ApiError
from kvanta.server.requests.protocol import Prompts, QueueFields, parameter_fields
from kvanta.server.requests.request_fields import POOLING_REFUSED, SCORE_REFUSED, Refused, check_fields, check_refused

MAX_INPUTS = 2048
"""Texts of one request, as in OpenAI's API."""
_TEXT = {"type": "string"}
_DOCUMENT = {"anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}]}
_ONE_OR_MORE = {"anyOf": [_TEXT, {"type": "array", "items": _DOCUMENT}]}
Text = Annotated[Any, WithJsonSchema(_DOCUMENT)]
Texts = Annotated[Any, WithJsonSchema(_ONE_OR_MORE)]
_POOLING_FIELDS = parameter_fields(PoolingParams)
_PoolingBody = create_model("_PoolingBody", __base__=QueueFields, **_POOLING_FIELDS)


class PoolingRequest(_PoolingBody):  # type: ignore[misc, valid-type]
    """Fields of the three endpoints. null means the default."""

    refused: ClassVar[Mapping[str, Refused]] = POOLING_REFUSED
    """Fields that the endpoint cannot honour."""

    add_special_tokens: bool | None = None

    def pooling_params(self, defaults: PoolingParams) -> PoolingParams:
        """Raises ApiError or InputError with the field. `defaults`: for fields that the request does not give."""
        extra = self.model_extra or {}
        check_refused(extra, self.refused)
        check_fields({name: value for name, value in extra.items() if name not in self.refused})
        given = {name: getattr(self, name) for name in self.model_fields_set & _POOLING_FIELDS.keys()}
        params = PoolingParams(**{name: value for name, value in given.items() if value is not None})
        return params.with_defaults(defaults)


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    input: Prompts
    encoding_format: str | None = None

    @property
    def as_base64(self) -> bool:
        """Embeddings are base64 of little-endian float32. Raises ApiError."""
        encoding = self.encoding_format or "float"
        if encoding not in ("float", "base64"):
            message = f"encoding_format must be float or base64, got {one_line(encoding)}"
            raise ApiError(400, message, param="encoding_format")
        return encoding == "base64"


class RerankRequest(PoolingRequest):
    """POST /rerank, as Jina's and Cohere's."""

    query: Text
    documents: Texts
    top_n: int | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> tuple[str, list[str]]:
        """Query and documents. Raises ApiError."""
        queries = read_texts("query", self.query)
        if len(queries) != 1:
            raise ApiError(400, f"query must be one text, got {len(queries)}", param="query")
        return queries[0], read_texts("documents", self.documents)

    @property
    def most_results(self) -> int:
        """Number of results, at most. Raises InputError."""
        return whole_number("top_n", self.top_n or 0, 0, 2**31 - 1, " (0: all)") or MAX_INPUTS


class ScoreRequest(PoolingRequest):
    """POST /score; vLLM has several names for the two fields."""

    refused = SCORE_REFUSED

    text_1: Texts = None
    text_2: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None

    @property
    def sides(self) -> dict[str, list[str]]:
        """The texts of the two fields, as many or one of the first. Raises ApiError."""
        first, left = self._side("text_1", "data_1", "queries")
        second, right = self._side("text_2", "data_2", "documents", "items")
        if len(left) not in (1, len(right)):
            message = f"{first} must have one text or as many as the other side, {len(right)}, got {len(left)}"
            raise ApiError(400, message, param=first)
        return {first: left, second: right}

    def _side(self, *names: str) -> tuple[str, list[str]]:
        """The texts under one of the names, and the name."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            message = f"give one of {', '.join(names)}, got {' and '.join(given) or 'nothing'}"
            raise ApiError(400, message, param=given[1] if given else names[0])
        return given[0], read_texts(given[0], getattr(self, given[0]))


def check_number(name: str, texts: list[Any]) -> None:
    """Raises ApiError for too many texts."""
    if len(texts) > MAX_INPUTS:
        message = f"{name} must have at most {MAX_INPUTS} texts, got {len(texts)}"
        raise ApiError(400, message, param=name)


def read_texts(name: str, value: Any) -> list[str]:
    """Texts of the field `name`, from a text, {"text"}, or a list of them. Raises ApiError."""
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise ApiError(400, f"{name} is an empty list", param=name)
    check_number(name, entries)
    texts: list[str] = []
    for entry in entries:
        text = entry.get("text") if isinstance(entry, Mapping) else entry
        if isinstance(text, str) and text:
            texts.append(text)
        else:
            message = f'{name} must be texts that are not empty, or objects with such a "text", got {one_line(value)}'
            raise ApiError(400, message, param=name)
    return texts
