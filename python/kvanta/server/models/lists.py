"""Lists of the models in the shapes that clients know, with their states."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import h11

from kvanta.server.models.pool import Model, ModelPool

_FOREVER = timedelta(days=365 * 100).total_seconds()


def _status(model: Model) -> dict[str, Any]:
    """State of a model as llama.cpp's server lists it, with the reason of a failure."""
    failed = {"failed": True, "error": model.failure} if model.failure else {}
    return {"value": model.state, **failed}


def openai_card(model: Model, created: int) -> dict[str, Any]:
    """An entry of /v1/models. What only the model itself can say is there once it has been loaded."""
    card = {"object": "model", "owned_by": "kvanta", "root": model.entry.path, "parent": None}
    return {**card, **model.card, "id": model.name, "created": created, "status": _status(model)}


def anthropic_card(model: Model, created: int) -> dict[str, Any]:
    """The same as Anthropic's clients know it."""
    longest = model.card.get("max_model_len")
    lengths = {} if longest is None else {"max_input_tokens": longest, "max_tokens": longest}
    at = datetime.fromtimestamp(created, UTC).isoformat()
    head = {"type": "model", "id": model.name, "display_name": model.name, "created_at": at, "lifecycle": "active"}
    return {**head, **lengths}


def ollama_card(model: Model, created: int) -> dict[str, Any]:
    """An entry of /api/tags."""
    name = model.name if ":" in model.name.rpartition("/")[2] else f"{model.name}:latest"
    at = _time(datetime.fromtimestamp(created, UTC))
    unknown = {"size": 0, "digest": "", "details": {"format": "kvanta"}}
    return {**unknown, **model.tag, "name": name, "model": name, "modified_at": at, "state": model.state}


def ollama_running(pool: ModelPool, created: int) -> list[dict[str, Any]]:
    """/api/ps: the models in memory, and until when they stay there."""
    rows = []
    for model in pool.models.values():
        if model.process is None:
            continue
        seconds = _FOREVER if math.isinf(model.expires_in) else model.expires_in
        expires = _time(datetime.now(UTC) + timedelta(seconds=seconds))
        extra = {"expires_at": expires, "size_vram": 0, "context_length": model.card.get("max_model_len", 0)}
        rows.append({**ollama_card(model, created), **extra})
    return rows


def props(pool: ModelPool) -> dict[str, Any]:
    """/props without a model: llama.cpp's clients learn that there are several."""
    settings = {"n_ctx": 0, "params": {}}
    models = [{"id": model.name, "status": _status(model)} for model in pool.models.values()]
    return {"role": "router", "model_path": "none", "default_generation_settings": settings, "models": models}


async def slots(pool: ModelPool) -> list[dict[str, Any]]:
    """/slots without a model: those of the models in memory."""

    async def of(model: Model) -> list[dict[str, Any]]:
        try:
            assert model.process is not None
            return [{"model": model.name, **slot} for slot in await pool.ask(model.process, "/slots") or ()]
        except (OSError, h11.RemoteProtocolError):
            return []

    rows = await asyncio.gather(*(of(model) for model in pool.models.values() if model.process is not None))
    return [slot for row in rows for slot in row]


def _time(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
