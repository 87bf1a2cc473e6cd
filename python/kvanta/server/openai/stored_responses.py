"""Responses that are kept for an hour, within a number of bytes: `previous_response_id`, retrieval, deletion."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvanta.server.http.errors import ApiError, json_bytes

SECONDS = 3600.0
_PREFIXES = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}
Items = list[dict[str, Any]]


@dataclass(frozen=True)
class StoredResponse:
    """A response as it was sent, in JSON, and the items of its request; its memory is that of these texts."""

    response: bytes
    items: bytes
    previous: str
    """Id of the response before it; empty: none."""
    owner: str
    """Digest of the API key that made it; empty: the server has none."""
    expires: float

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """Responses by id; the least recently used are dropped first. Threads may share it."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def size(self) -> int:
        """Bytes of all responses."""
        return self._bytes

    def put(self, response: dict[str, Any], items: Items, previous: str, owner: str) -> bool:
        """Keeps a response; False if it is larger than the whole store."""
        entry = StoredResponse(json_bytes(response), json_bytes(items), previous, owner, self._clock() + SECONDS)
        if entry.size > self._max_bytes:
            return False
        with self._lock:
            self._drop(str(response["id"]))
            self._stored[str(response["id"])] = entry
            self._bytes += entry.size
            now = self._clock()
            for name in [name for name, each in self._stored.items() if each.expires <= now]:
                self._drop(name)
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._stored)))
        return True

    def get(self, name: str, owner: str) -> StoredResponse:
        """A response, which counts as used. Raises ApiError 404 for one of another key as for an unknown one."""
        with self._lock:
            entry = self._stored.get(name)
            if entry is None or entry.owner != owner or entry.expires <= self._clock():
                message = f"there is no stored response {name[:100]!r}: it never was, or was dropped or deleted"
                raise ApiError(404, message, code="response_not_found", param="response_id")
            self._stored.move_to_end(name)
            return entry

    def delete(self, name: str, owner: str) -> None:
        """Raises ApiError 404."""
        self.get(name, owner)
        with self._lock:
            self._drop(name)

    def history(self, name: str, owner: str) -> Items:
        """Items of a conversation up to and with the response `name`, oldest first. Raises ApiError."""
        turns: list[Items] = []
        seen = set()
        while name and name not in seen:
            seen.add(name)
            try:
                entry = self.get(name, owner)
            except ApiError:
                message = f"previous_response_id: there is no stored response {name[:100]!r}"
                raise ApiError(400, message, code="previous_response_not_found", param="previous_response_id") from None
            turns.append([*json.loads(entry.items), *json.loads(entry.response)["output"]])
            name = entry.previous
        return [item for turn in reversed(turns) for item in turn]

    def resolved(self, items: Items, owner: str) -> Items:
        """The items of an input, with the stored ones in place of references to them. Raises ApiError."""
        missing = {str(item.get("id")) for item in items if is_reference(item)}
        found: dict[str, dict[str, Any]] = {}
        with self._lock:
            now = self._clock()
            entries = [each for each in self._stored.values() if each.owner == owner and each.expires > now]
        for entry in reversed(entries):
            for item in (*json.loads(entry.response)["output"], *json.loads(entry.items)):
                if item["id"] in missing:
                    missing.remove(item["id"])
                    found[item["id"]] = item
            if not missing:
                return [found[str(item.get("id"))] if is_reference(item) else item for item in items]
        message = (
            f"item_reference: there is no stored item {min(missing)[:100]!r}: it never was, or was dropped or deleted"
        )
        raise ApiError(404, message, code="item_not_found", param="input")

    def _drop(self, name: str) -> None:
        entry = self._stored.pop(name, None)
        if entry is not None:
            self._bytes -= entry.size


def is_reference(item: Any) -> bool:
    """True for an item of an input that names a stored one."""
    return isinstance(item, dict) and item.get("type") == "item_reference"


def named_items(given: Any) -> Items:
    """The items of an input, which may be a text, each with an id."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    items = given if isinstance(given, list) else []
    return [_named(item) for item in items if isinstance(item, dict)]


def _named(item: dict[str, Any]) -> dict[str, Any]:
    kind = str(item.get("type", "message"))
    return {"id": _PREFIXES.get(kind, "item_") + secrets.token_hex(12), "type": kind, **item}


def page_of(items: Items, limit: int, order: str, after: str | None) -> dict[str, Any]:
    """A page of a response's input items, as OpenAI's list of them. Raises ApiError."""
    if not 1 <= limit <= 100:
        raise ApiError(400, f"limit must be in 1..100, got {limit}", param="limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order[:20]!r}", param="order")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        at = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if at is None:
            raise ApiError(400, f"after: there is no item {after[:100]!r}", param="after")
        ordered = ordered[at + 1 :]
    data = ordered[:limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return {"object": "list", "data": data, **ends, "has_more": len(ordered) > limit}
