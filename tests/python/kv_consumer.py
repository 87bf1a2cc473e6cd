"""A consumer of KV events: decodes messages without Kvanta's classes, and keeps the index that they describe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

Page = tuple[int | None, tuple[int, ...]]
"""Hash of the block before it, and its own tokens."""
END = (-1).to_bytes(8, "big", signed=True)


class KvIndex:
    """Pages by group and hash."""

    def __init__(self, decode: Callable[[bytes], list[dict[str, Any]]] | None = None) -> None:
        self.pages: dict[tuple[int, int], Page] = {}
        self.clears = self.removals = 0
        self._decode = decode or decode_batch

    def apply(self, payload: bytes) -> None:
        """Applies one message."""
        for event in self._decode(payload):
            kind, group = event["type"], event.get("group_idx", 0)
            if kind == "AllBlocksCleared":
                self.pages.clear()
                self.clears += 1
                continue
            hashes = event["block_hashes"]
            if kind == "BlockRemoved":
                for each in hashes:
                    del self.pages[group, each]
                self.removals += len(hashes)
                continue
            assert kind == "BlockStored"
            size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
            assert len(tokens) == size * len(hashes)
            for number, each in enumerate(map(int, hashes)):
                assert (group, each) not in self.pages
                self.pages[group, each] = (parent, tuple(tokens[number * size : (number + 1) * size]))
                parent = each


def decode_batch(payload: bytes) -> list[dict[str, Any]]:
    """The events of a message, as plain dictionaries."""
    _, events, _ = msgspec.msgpack.decode(payload)
    return events  # type: ignore[no-any-return]


class Subscriber:
    """Receives batches in order; requests those that it has missed."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._updates = context.socket(zmq.SUB)
        self._updates.connect(endpoint)
        self._updates.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self.next = 0
        self.replayed = 0

    def receive(self, index: KvIndex, timeout: float = 0.5) -> bool:
        """Applies one message, after those that came before it; False if there is none."""
        if not self._updates.poll(int(timeout * 1000)):
            return False
        _, number, payload = self._updates.recv_multipart()
        if int.from_bytes(number, "big") > self.next:
            self.catch_up(index)
        if int.from_bytes(number, "big") == self.next:
            index.apply(payload)
            self.next += 1
        return True

    def catch_up(self, index: KvIndex) -> None:
        """Applies what the publisher still has, from the next number on."""
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(10_000), "no replay"
            _, _, number, payload = self._replay.recv_multipart()
            if number == END:
                return
            assert int.from_bytes(number, "big") == self.next
            index.apply(payload)
            self.next += 1
            self.replayed += 1

    def wait_for(self, index: KvIndex, done: Callable[[], bool]) -> None:
        """Applies messages until `done`."""
        pause = threading.Event()
        for _ in range(1000):
            if done():
                return
            if not self.receive(index, 0.05):
                self.catch_up(index)
                pause.wait(0.01)
        raise AssertionError("the events did not come")

    def close(self) -> None:
        self._updates.close(linger=0)
        self._replay.close(linger=0)


def addresses(folder: Path) -> dict[str, str]:
    """Two endpoints in a folder."""
    return {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
