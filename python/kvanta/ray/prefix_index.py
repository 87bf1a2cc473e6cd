"""Index of the prefixes that a replica holds: hashes of the token ids of whole pages, from the first token on."""

from __future__ import annotations

import hashlib
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

from kvanta import _core

_EXPECTED_SECONDS = 5.0
"""Time until a replica has reported the pages of a prompt that was sent to it."""


def page_hashes(tokens: Sequence[int], page_size: int, salt: str = "") -> Iterator[bytes]:
    """The hash of every whole page of a prompt, each with all tokens before it."""
    above = _root(salt)
    for begin, end in pairwise(range(0, len(tokens) + 1, page_size)):
        above = _hash(above, tokens[begin:end])
        yield above


def _root(salt: str) -> bytes:
    return hashlib.blake2b(salt.encode(), digest_size=8).digest()


def _hash(above: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}i", *tokens), digest_size=8, key=above).digest()


class PrefixIndex:
    """The pages of an engine, by its KV events (an EventConsumer). Any thread may look them up."""

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}  # by the engine's hash
        self._lock = threading.Lock()

    def apply(self, events: Iterable[_core.KvEvent]) -> None:
        """Takes the changes of the first KV cache group; pages of others are there where its pages are, mostly."""
        with self._lock:
            for event in events:
                if event.kind == _core.KvEventKind.CLEARED:
                    self._hashes.clear()
                elif event.group == 0 and event.kind == _core.KvEventKind.REMOVED:
                    self._hashes.pop(event.block_hash, None)
                elif event.group == 0:
                    parent = event.parent_block_hash
                    above = _root(event.cache_salt) if parent is None else self._hashes.get(parent)
                    if above is not None:
                        self._hashes[event.block_hash] = _hash(above, event.tokens)

    def idle(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is held."""

    def pages(self) -> bytes:
        """The hashes of all pages, 8 bytes each."""
        with self._lock:
            return b"".join(self._hashes.values())


class ReplicaPages:
    """A router's view of one replica: what it has reported, and what was sent to it since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported: frozenset[bytes] = frozenset()
        self._sent: dict[bytes, float] = {}
        self._source = b""

    def report(self, pages: bytes) -> None:
        """Takes PrefixIndex.pages()."""
        if pages != self._source:
            self._source = pages
            self._reported = frozenset(pages[begin : begin + 8] for begin in range(0, len(pages), 8))
        old = self._clock() - _EXPECTED_SECONDS
        self._sent = {each: sent for each, sent in self._sent.items() if sent > old}

    def send(self, hashes: Iterable[bytes]) -> None:
        """A prompt of these pages goes there: for some seconds, they count as being there."""
        self._sent.update(dict.fromkeys(hashes, self._clock()))

    @property
    def count(self) -> int:
        """Pages that are there."""
        return len(self._reported) + len(self._sent)

    def matched(self, hashes: Iterable[bytes]) -> int:
        """Pages of the prompt that are there, from the first one on."""
        count = 0
        for each in hashes:
            if each not in self._reported and each not in self._sent:
                break
            count += 1
        return count
