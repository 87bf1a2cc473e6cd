"""Hints: fields and values of a request that are accepted without effect on the answer.

Each is named in the answer's header `x-kvanta-ignored`, and once for each name in the log. A field that would change
the answer is no hint: it is honoured or refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from kvanta.params.checks import one_line

_log = logging.getLogger("kvanta.server")
HEADER = "x-kvanta-ignored"
_NAME = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,64}")
_MAX_NAMES = 32
"""Of one request: a client may send many fields."""
_MAX_LOGGED = 100
_noted: ContextVar[list[str] | None] = ContextVar("noted", default=None)
_logged: set[str] = set()


class Hint(NamedTuple):
    """Reason why a field has no effect, and the version that accepts it first."""

    reason: str
    since: str = "0.1.0"


def begin() -> list[str]:
    """Begins the names of a request, which is the context's; work on other threads must get a copy of the context."""
    names: list[str] = []
    _noted.set(names)
    return names


def note(name: str, reason: str) -> None:
    """Names a hint. `reason`: why it has no effect, for the log."""
    names = _noted.get()
    if names is not None and name not in names and len(names) < _MAX_NAMES and _NAME.fullmatch(name):
        names.append(name)
    if name not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(name)
        _log.warning("a request has %s, which has no effect: %s", one_line(name), reason)


def note_fields(given: Mapping[str, Any], table: Mapping[str, Hint], prefix: str = "") -> None:
    """Names the fields of `table` that are given and not null. `prefix`: of the fields' names."""
    for name, value in given.items():
        hint = table.get(name)
        if hint is not None and value is not None:
            note(prefix + name, hint.reason)


def rename(names: Mapping[str, str]) -> None:
    """Gives hints of fields that were read under other names those of the request. `names`: the others -> its own."""
    noted = _noted.get()
    if noted:
        noted[:] = dict.fromkeys(_renamed(name, names) for name in noted)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    field, dot, part = name.partition(".")
    return names.get(name) or names.get(field, field) + dot + part
