"""Level events of an answer (docs/pressure.md), as dictionaries {"position": 640, "pages": [1, 8], "level": 1}.

Queries from `position` on read these pages, the second number excluded, from that level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line, whole_number

MAX_EVENTS = 2**16
_KEYS = {"position", "pages", "level"}
_MOST = 2**31 - 1

EngineEvent = tuple[int, int, int, int]
"""An event of the engine: position, first page, end page, level."""


def check_events(name: str, value: Any) -> list[dict[str, Any]]:
    """The events of a request. Raises InputError."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InputError(f"{name} must be a list of events or None, got {one_line(value)}")
    events = list(value)
    if len(events) > MAX_EVENTS:
        raise InputError(f"{name} must have at most {MAX_EVENTS} events, got {len(events)}")
    return [_event(name, event) for event in events]


def _event(name: str, event: Any) -> dict[str, Any]:
    pages = event.get("pages") if isinstance(event, Mapping) and set(event) == _KEYS else None
    if not isinstance(pages, Sequence) or isinstance(pages, str) or len(pages) != 2:
        raise InputError(
            f'an event of {name} must be like {{"position": 640, "pages": [1, 8], "level": 1}}, got {one_line(event)}'
        )
    return {
        "position": whole_number(f"position of {name}", event["position"], 0, _MOST),
        "pages": [whole_number(f"a page of {name}", page, 0, _MOST) for page in pages],
        "level": whole_number(f"level of {name}", event["level"], 0, _MOST),
    }


def engine_events(events: Iterable[Mapping[str, Any]]) -> list[EngineEvent]:
    """Checked events, as the engine takes them."""
    return [(event["position"], *event["pages"], event["level"]) for event in events]


def shown_events(events: Iterable[EngineEvent]) -> list[dict[str, Any]]:
    """The engine's events, as answers have them."""
    return [{"position": position, "pages": [first, end], "level": level} for position, first, end, level in events]
