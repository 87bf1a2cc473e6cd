"""Prompt tokens that replicas have to compute before the first tokens of requests that this process has sent.

A module of its own, as replica_stats: routers write here, and the fronts that see the first tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable

_lock = threading.Lock()
_requests: dict[str, tuple[Hashable, int]] = {}
_tokens: Counter[Hashable] = Counter()


def expect(request: str, replica: Hashable, tokens: int) -> None:
    """A request goes to a replica, which computes so many tokens of its prompt. Chosen again, it has them already."""
    with _lock:
        if request in _requests and _requests[request][0] == replica:
            return
        _drop(request)
        _requests[request] = replica, tokens
        _tokens[replica] += tokens


def move(request: str, replica: Hashable) -> None:
    """A request went to another replica than expected."""
    with _lock:
        tokens = _drop(request)
        if tokens:
            _requests[request] = replica, tokens
            _tokens[replica] += tokens


def forget(request: str) -> None:
    """A request has its first token, or has ended."""
    with _lock:
        _drop(request)


def of(replica: Hashable) -> int:
    """Tokens of a replica."""
    return _tokens[replica]


def _drop(request: str) -> int:
    replica, tokens = _requests.pop(request, (None, 0))
    _tokens[replica] -= tokens
    if not _tokens[replica]:
        del _tokens[replica]
    return tokens
