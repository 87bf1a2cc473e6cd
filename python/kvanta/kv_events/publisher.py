"""Publisher of KV events: a PUB socket, and a ROUTER socket for consumers that have missed some."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import zmq

from kvanta import _core
from kvanta.errors import ResourceError
from kvanta.kv_events.config import KvEventsConfig
from kvanta.kv_events.messages import EventEncoder

_END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number behind the last batch of a replay."""
_LINGER = 1000
"""Milliseconds that a closed socket goes on sending."""


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
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._count = 0
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
                # A subscriber acknowledges every half high-water mark: a whole replay and its end always fit.
                self._replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                self.replay_endpoint = _open(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)
        except ResourceError:
            self.close()
            raise

    def apply(self, events: Sequence[_core.KvEvent]) -> None:
        """Publishes them as one batch."""
        number = self._count.to_bytes(8, "big")
        payload = self._encoder.batch(events, time.time(), self._rank)
        self._publish.send_multipart((self._topic, number, payload))
        self._sent.append((number, payload))
        self._count += 1

    def idle(self) -> None:
        """Sends batches again to those who ask: from the requested number on, as far as they are kept."""
        while self._replay is not None and self._replay.poll(0):
            request = self._replay.recv_multipart()
            if len(request) != 3 or len(request[2]) != 8:  # not a client of this protocol
                continue
            client, _, first = request
            for number, payload in self._sent:
                if number >= first:
                    self._replay.send_multipart((client, b"", self._topic, number, payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))

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
