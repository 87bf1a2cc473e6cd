"""Publisher of KV events: a PUB socket, and a ROUTER socket for consumers that have missed some."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import zmq

from kvanta import _core
from kvanta.errors import ResourceError
from kvanta.kv_events.config import KvEventsConfig
from kvanta.kv_events.messages import EventEncoder

_END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number sent after the last batch of a replay."""
_LINGER = 1000
"""Milliseconds that a closed socket goes on sending."""
_SLICE = 1024
"""Batches that one call of idle() sends again: those that are new must not wait for a long replay."""
_MAX_REPLAYS = 64
"""Clients at a time; the requests of further ones wait."""
_REPLAY_HWM = 1024
"""Messages that wait for one client."""
_PATIENCE = 100
"""Calls of idle(), 1 to 10 seconds, after which a replay ends whose client takes nothing."""


@dataclass
class _Replay:
    """Batches that a client has requested and not received yet."""

    client: bytes
    next: int
    end: int
    blocked: int = 0
    """Calls of idle() since it took anything."""


class KvEventPublisher:
    """Publishes batches of an engine's events as (topic, number, payload). Every method is called on one thread."""

    def __init__(self, engine: _core.Engine, config: KvEventsConfig, *, rank: int = 0) -> None:
        """`rank`: of several engines of one server; vLLM's data_parallel_rank. Raises ResourceError."""
        self._rank = rank
        self._encoder = EventEncoder(
            block_size=engine.config.page_size,
            medium="GPU" if engine.config.device == "cuda" else "CPU",
            groups=engine.stats()["groups"],
        )
        self._topic = config.topic.encode()
        # Frames, which all clients' messages share.
        self._sent: deque[tuple[int, zmq.Frame]] = deque(maxlen=config.buffer_steps)
        self._count = 0
        self._replays: dict[bytes, _Replay] = {}
        config = config.of_rank(rank)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publish = context.socket(zmq.PUB)
        self._publish.set_hwm(config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _open(self._publish, "endpoint", config.endpoint)
            self.replay_endpoint = None
            if config.replay_endpoint is not None:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.setsockopt(zmq.SNDHWM, _REPLAY_HWM)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error, not a lost message
                self.replay_endpoint = _open(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)
        except ResourceError:
            self.close()
            raise

    def apply(self, events: Sequence[_core.KvEvent]) -> None:
        """Publishes them as one batch."""
        payload = self._encoder.batch(events, time.time(), self._rank)
        self._publish.send_multipart((self._topic, self._count.to_bytes(8, "big"), payload))
        self._sent.append((self._count, zmq.Frame(payload, copy=False)))
        self._count += 1

    def idle(self) -> None:
        """Sends batches again to clients that request them: from the requested number on, those that are still kept.

        Each client has one replay at a time. All of them together get a slice of their batches, as much as they take.
        """
        if self._replay is None:
            return
        self._take_requests(self._replay)
        left = _SLICE
        for each in list(self._replays.values()):
            left -= self._continue(self._replay, each, max(1, left // len(self._replays)))

    def _take_requests(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_REPLAYS):
            if len(self._replays) == _MAX_REPLAYS or not socket.poll(0):
                return
            request = socket.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:  # not a client of this protocol
                continue
            client, _, first = request
            if client not in self._replays:
                self._replays[client] = _Replay(client, int.from_bytes(first, "big"), self._count)

    def _continue(self, socket: zmq.Socket[bytes], replay: _Replay, limit: int) -> int:
        """Sends up to `limit` batches, and the end after the last. Returns their number."""
        sent = 0
        replay.next = max(replay.next, self._count - len(self._sent))
        begin = replay.next - (self._count - len(self._sent))
        try:
            for number, payload in islice(self._sent, begin, begin + min(limit, max(0, replay.end - replay.next))):
                frames = (replay.client, b"", self._topic, number.to_bytes(8, "big"), payload)
                socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
                replay.next, sent = number + 1, sent + 1
            if replay.next >= replay.end:
                socket.send_multipart((replay.client, b"", b"", _END, b""), zmq.NOBLOCK)
                del self._replays[replay.client]
        except zmq.Again:
            replay.blocked = 0 if sent else replay.blocked + 1
            if replay.blocked == _PATIENCE:
                del self._replays[replay.client]
        except zmq.ZMQError:  # the client is gone
            del self._replays[replay.client]
        return sent

    def close(self) -> None:
        """Closes the sockets; what was published is still sent."""
        for each in (self._publish, self._replay):
            if each is not None:
                each.close(linger=_LINGER)


def _open(socket: zmq.Socket[bytes], name: str, endpoint: str, *, bind: bool = False) -> str:
    """Binds, or connects to an address that names another host, as vLLM does; returns the address."""
    binds = bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        if not binds:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT) or endpoint
    except zmq.ZMQError as error:
        raise ResourceError(f"kv_events_config: {name} {endpoint} cannot be used: {error}") from None
