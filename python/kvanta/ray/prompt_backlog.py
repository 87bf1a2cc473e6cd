"""Requests that this process has sent: prompt tokens that replicas have to compute before the first tokens, and ends.

A separate module, as replica_stats is: routers write here, and so do the fronts that see the first tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Mapping

_lock = threading.Lock()
_unfinished: set[str] = set()
_lacks: dict[str, Mapping[Hashable, int]] = {}  # of a request, by replica; empty until one is chosen
_at: dict[str, tuple[Hashable, int]] = {}
_tokens: Counter[Hashable] = Counter()


def begin(request: str) -> None:
    """Registers a request about to be sent; until forget(), it is part of its replica's backlog, and until end(), it is
    unfinished.
    """
    with _lock:
        _drop(request)
        _lacks[request] = {}
        _unfinished.add(request)


def expect(request: str, replica: Hashable, lacks: Mapping[Hashable, int]) -> None:
    """A request goes to a replica. `lacks`: prompt tokens that each replica would compute.

    A request that is chosen for again has its pages there already, and keeps its first numbers.
    """
    with _lock:
        if request in _lacks and not _lacks[request]:
            _lacks[request] = lacks
            _count(request, replica)


def move(request: str, replica: Hashable) -> None:
    """A request went to another replica than expected, perhaps."""
    with _lock:
        if request in _lacks:
            _count(request, replica)


def forget(request: str) -> None:
    """A request has its first token. Most calls are of later tokens: they take no lock."""
    if request in _lacks:
        with _lock:
            _drop(request)


def end(request: str) -> None:
    """A request has its last token, or has failed."""
    with _lock:
        _drop(request)
        _unfinished.discard(request)


def is_unfinished(request: str) -> bool:
    """True from begin() to end()."""
    return request in _unfinished


def of(replica: Hashable) -> int:
    """Tokens of a replica."""
    return _tokens[replica]


def _count(request: str, replica: Hashable) -> None:
    _uncount(request)
    tokens = _lacks[request].get(replica, 0)
    _at[request] = replica, tokens
    _tokens[replica] += tokens


def _uncount(request: str) -> None:
    if request not in _at:
        return
    replica, tokens = _at.pop(request)
    _tokens[replica] -= tokens
    if not _tokens[replica]:
        del _tokens[replica]


def _drop(request: str) -> None:
    _uncount(request)
    _lacks.pop(request, None)
