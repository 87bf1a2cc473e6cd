"""Messages between a front and its replicas: requests and outputs of the engine, which pickle."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ray import cloudpickle

import kvanta
from kvanta import _core
from kvanta.constraints.structured_output import ConstraintRecipe
from kvanta.text.tokenizer import Tokenizer

_TOKENIZER = "tokenizer"


@dataclass
class EngineRequest:
    """The arguments of Engine.add."""

    name: str
    prompt: list[int]
    sampling: dict[str, Any]
    cache_salt: str = ""
    priority: int = 0
    timeout_seconds: float = 0.0
    constraint: bytes = b""
    """A ConstraintRecipe, by pack_recipe; empty: none."""
    pooling: dict[str, Any] | None = None
    generated: list[int] = field(default_factory=list)
    user: str = ""
    identity: str = ""
    """Identity of the engine that the request is meant for, by identity_of."""


class OtherEngineError(Exception):
    """The replica has another model, cache format or version than the request is meant for."""


def identity_of(engine: _core.Engine) -> str:
    """Hash of all that tokens depend on but the CPU's instruction set, and of the version, which messages depend on."""
    values = json.loads(engine.cache_identity)
    del values["isa"]
    text = json.dumps([kvanta.__version__, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_of(request: EngineRequest) -> EngineRequest:
    """A request for its first token alone, by which an engine of the role prefill stores the prompt's pages."""
    return EngineRequest(
        request.name,
        request.prompt,
        {**fields_of(_core.SamplingParams()), "max_tokens": 1},
        request.cache_salt,
        request.priority,
        request.timeout_seconds,
        user=request.user,
        identity=request.identity,
    )


class TokenLogprob(NamedTuple):
    """The engine's TokenLogprob, as a message."""

    token: int
    logprob: float
    rank: int


class Times(NamedTuple):
    """The engine's Times, as a message: seconds on the replica's clock."""

    added: float
    scheduled: float
    first_token: float
    last_token: float


_NEVER = Times(0.0, 0.0, 0.0, 0.0)


class KvCacheRecord(NamedTuple):
    """The engine's KvCacheRecord, as a message."""

    pages: list[int]
    events: list[tuple[int, int, int, int]]
    is_replayable: bool


@dataclass
class RemoteOutput:
    """The engine's EngineOutput, as a message."""

    id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    embedding: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    finish: _core.FinishReason = _core.FinishReason.NONE
    stop_token: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    kv_cache: KvCacheRecord | None = None
    times: Times = _NEVER
    lost_rank: int | None = None
    error: str = ""
    invalid_input: bool = False

    @classmethod
    def of(cls, output: _core.EngineOutput) -> RemoteOutput:
        """A copy that pickles."""
        times, record = output.times, output.kv_cache
        return cls(
            id=output.id,
            tokens=output.tokens,
            logprobs=_logprobs(output.logprobs),
            prompt_logprobs=_logprobs(output.prompt_logprobs),
            embedding=output.embedding,
            finish=output.finish,
            stop_token=output.stop_token,
            draft_tokens=output.draft_tokens,
            accepted_tokens=output.accepted_tokens,
            cached_tokens=output.cached_tokens,
            preemptions=output.preemptions,
            kv_cache=None if record is None else KvCacheRecord(record.pages, record.events, record.is_replayable),
            times=Times(times.added, times.scheduled, times.first_token, times.last_token),
            lost_rank=output.lost_rank,
            error=output.error,
            invalid_input=output.invalid_input,
        )


def _logprobs(rows: Sequence[Sequence[_core.TokenLogprob]]) -> list[list[TokenLogprob]]:
    return [[TokenLogprob(each.token, each.logprob, each.rank) for each in row] for row in rows]


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a structure of the C++ library."""
    return {name: getattr(value, name) for name in dir(type(value)) if _is_field(type(value), name)}


def set_fields(value: Any, fields: dict[str, Any]) -> Any:
    """The structure with these fields."""
    for name, each in fields.items():
        setattr(value, name, each)
    return value


def _is_field(kind: type, name: str) -> bool:
    return not name.startswith("_") and not callable(getattr(kind, name))


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves the tokenizer out, which both sides have."""

    def persistent_id(self, obj: object) -> str | None:
        return _TOKENIZER if isinstance(obj, Tokenizer) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, tokenizer: Tokenizer) -> None:
        super().__init__(io.BytesIO(data))
        self._tokenizer = tokenizer

    def persistent_load(self, pid: object) -> Tokenizer:
        return self._tokenizer


def pack_recipe(recipe: ConstraintRecipe) -> bytes:
    """The recipe of a constraint, for a replica."""
    buffer = io.BytesIO()
    _Packer(buffer).dump(recipe)
    return buffer.getvalue()


def unpack_recipe(data: bytes, tokenizer: Tokenizer) -> ConstraintRecipe:
    """Its reverse."""
    recipe: ConstraintRecipe = _Unpacker(data, tokenizer).load()
    return recipe
