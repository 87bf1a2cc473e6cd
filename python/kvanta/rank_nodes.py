"""Ranks on several machines (nodes).

Ranks find each other, and report why one is lost, by small files in a folder (rank_folder). Each node other than 0 has
a connection to node 0, over which the files of the nodes' folders are copied; the values of the model go from rank to
rank by Gloo. With KVANTA_CLUSTER_KEY in the environment, both ends of a connection prove that they have the same key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.errors import InputError, ResourceError

_log = logging.getLogger("kvanta")
_KEY = "KVANTA_CLUSTER_KEY"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_UNFINISHED = (".new", ".text")
_MAX_FILE = 1 << 20
_POLL_S = 0.02
_STRANGER_S = 10.0
"""Time that a connection has to say which node it is."""
_MAX_CONNECTIONS = 64
_JOIN_S = 120
"""Least time that node 0 and the others wait for each other, as ranks do."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


@dataclass(frozen=True)
class Nodes:
    """The division of ranks among nodes, and the place of node 0."""

    count: int
    rank: int
    ranks: int
    """Of all nodes."""
    address: str
    port: int

    @staticmethod
    def of(config: _core.EngineConfig) -> Nodes:
        """Raises InputError for numbers that do not fit together."""
        ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        if ranks % config.nnodes:
            sizes = "tensor_parallel_size, pipeline_parallel_size"
            raise InputError(f"nnodes = {config.nnodes}: does not divide the number of ranks, {ranks} ({sizes})")
        if config.node_rank >= config.nnodes:
            raise InputError(f"node_rank = {config.node_rank}: there are nodes 0 to {config.nnodes - 1} (nnodes)")
        address, _, port = config.master_addr.partition(":")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise InputError(f"master_addr = {config.master_addr!r}: must be an address, or ADDRESS:PORT")
        return Nodes(config.nnodes, config.node_rank, ranks, address, int(port or config.master_port))

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(self.ranks * node // self.count, self.ranks * (node + 1) // self.count)


def _key() -> bytes:
    return os.environ.get(_KEY, "").encode()


def _facts(config: _core.EngineConfig, nodes: Nodes) -> dict[str, Any]:
    """Facts that all nodes must have in common before their ranks start, besides what ranks compare."""
    path = config.quantization_param_path
    scales = hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    return {"version": _core.version(), "nnodes": nodes.count, "ranks": nodes.ranks, "quantization_param_path": scales}


class _Link:
    """Copies the files of a folder to the other end of a connection, and those of the other end to the folder."""

    def __init__(self, connection: Connection, folder: str, on_end: Callable[[bool], None]) -> None:
        """`on_end` is called once, with True if the other end said that it is done."""
        self._connection = connection
        self._folder = Path(folder)
        self._on_end = on_end
        self._copied: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        for work in (self._receive, self._send):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """Sends what is left, and that this end is done."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            if not self._closed:
                self._send_new()
                self._connection.send_bytes(b"")
        self._closed = True

    def _send(self) -> None:
        while not self._closed:
            with self._lock, contextlib.suppress(OSError, ValueError):  # the receiving thread notices the end
                if not self._closed:
                    self._send_new()
            time.sleep(_POLL_S)

    def _send_new(self) -> None:
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if _is_finished(entry.name)]
        for name in sorted(set(names) - self._copied):
            self._copied.add(name)
            self._connection.send_bytes(name.encode() + b"\0" + (self._folder / name).read_bytes())

    def _receive(self) -> None:
        done = False
        with contextlib.suppress(EOFError, OSError, ValueError):
            while message := self._connection.recv_bytes(_MAX_FILE):
                encoded, _, content = message.partition(b"\0")
                name = encoded.decode("utf-8", "replace")
                if not _is_finished(name):
                    raise ValueError(name)
                self._copied.add(name)
                write_whole(self._folder / name, content)
            done = True
        self._closed = True
        self._on_end(done)


def _is_finished(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and not name.endswith(_UNFINISHED)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that others see whole or not at all; one that exists stays."""
    if path.exists():
        return
    unfinished = path.with_name(f"{path.name}.text")
    unfinished.write_bytes(content)
    unfinished.rename(path)


def report_lost(folder: str, rank: int, how: str) -> None:
    """Tells the ranks of this node why one is lost, unless it has said so itself."""
    with contextlib.suppress(OSError):
        write_whole(Path(folder, f"rank-{rank}.error"), how.encode())


def _keep_alive(connection: Connection) -> str:
    """Lets the connection end when the other machine is gone; returns the address of this end."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            end.setsockopt(socket.IPPROTO_TCP, option, value)
        return str(end.getsockname()[0])


def _prove(connection: Connection, *, first: bool) -> None:
    """Both ends show that they have the key, if this one has any."""
    if not (key := _key()):
        return
    steps = (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge)
    for step in steps:
        step(connection, key)


class NodeListener:
    """Node 0's end: waits for the other nodes."""

    def __init__(self, config: _core.EngineConfig, nodes: Nodes, folder: str) -> None:
        """Raises InputError if the port is taken, or the address is not this machine's."""
        self._nodes, self._folder = nodes, folder
        self._facts = _facts(config, nodes)
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._ending = False
        try:
            self._listener = Listener((nodes.address, nodes.port), backlog=16)
        except OSError as error:
            where = f"{nodes.address}:{nodes.port}"
            raise InputError(f"master_addr, master_port: cannot listen at {where}: {error.strerror or error}") from None
        self.port = int(self._listener.address[1])
        _log.info("waiting for nodes 1 to %d at %s:%d", nodes.count - 1, nodes.address, self.port)
        self._strangers = threading.Semaphore(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Tells the nodes that the engine ends."""
        self._ending = True
        self._listener.close()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.close()

    def _accept(self) -> None:
        while not self._ending:
            try:
                connection = self._listener.accept()
            except OSError:
                if not self._ending:
                    time.sleep(_POLL_S)
                continue
            if not self._strangers.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        try:
            # A stranger that says nothing is cut off.
            timer = threading.Timer(_STRANGER_S, _shut, (connection,))
            timer.daemon = True
            timer.start()
            _keep_alive(connection)
            _prove(connection, first=True)
            facts = json.loads(connection.recv_bytes(_MAX_FILE))
            node = facts.get("node") if isinstance(facts, dict) else None
            if not (type(node) is int and 0 < node < self._nodes.count):
                raise ValueError(f"there are nodes 1 to {self._nodes.count - 1} besides node 0")
            error = self._join(node, facts, connection, timer)
            if error:
                _log.warning("node %d is refused: %s", node, error)
                connection.send_bytes(json.dumps({"error": error}).encode())
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            _log.warning("a connection to master_port is refused: %s", error or type(error).__name__)
            connection.close()
        finally:
            self._strangers.release()

    def _join(self, node: int, facts: Mapping[str, Any], connection: Connection, timer: threading.Timer) -> str:
        """The reason for which a node is refused, or none."""
        for name, own in self._facts.items():
            if facts.get(name) != own:
                return f"node {node} has {name} = {facts.get(name)}, and node 0 has {own}; both must have the same"
        with self._lock:
            if node in self._links:
                return f"node_rank = {node}: there is one already"
            link = _Link(connection, self._folder, lambda done: self._on_end(node, done))
            self._links[node] = link
        timer.cancel()
        _log.info("node %d has come", node)
        connection.send_bytes(b'{"error": ""}')
        link.start()
        return ""

    def _on_end(self, node: int, done: bool) -> None:
        if self._ending:
            return
        how = "ended its ranks" if done else "closed its connection, or the network failed"
        for rank in self._nodes.ranks_of(node):
            report_lost(self._folder, rank, f"its node, {node} of {self._nodes.count}, {how}")


def _shut(connection: Connection) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


class NodeConnection:
    """Another node's end."""

    def __init__(self, config: _core.EngineConfig, nodes: Nodes) -> None:
        """Waits for node 0. Raises InputError if that refuses this node, ResourceError if it does not come."""
        self._ended = threading.Event()
        self._lost = False
        self._link: _Link | None = None
        where = f"{nodes.address}:{nodes.port}"
        limit = max(_JOIN_S, config.distributed_timeout_seconds)
        deadline = time.monotonic() + limit
        while True:
            try:
                self._connection = Client((nodes.address, nodes.port))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    text = f"node 0 has not come within {limit} seconds at {where}: {error.strerror or error}"
                    raise ResourceError(text) from None
                time.sleep(0.1)
        try:
            self.address = _keep_alive(self._connection)
            """Of this machine, at which node 0 reaches it."""
            _prove(self._connection, first=False)
            self._connection.send_bytes(json.dumps({"node": nodes.rank, **_facts(config, nodes)}).encode())
            refusal = json.loads(self._connection.recv_bytes(_MAX_FILE))["error"]
        except (OSError, EOFError, ValueError, AuthenticationError) as reason:
            why = f"{reason or type(reason).__name__}; do both have the same {_KEY}?"
            raise InputError(f"node 0 at {where} does not take this node: {why}") from None
        if refusal:
            raise InputError(refusal)

    def start(self, folder: str) -> None:
        """Begins to copy the folder's files."""
        self._link = _Link(self._connection, folder, self._on_end)
        self._link.start()

    def close(self) -> None:
        """Tells node 0 that this node's ranks have ended."""
        if self._link is not None:
            self._link.close()

    def wait(self, seconds: float) -> bool:
        """True once node 0 has ended."""
        return self._ended.wait(seconds)

    @property
    def lost(self) -> bool:
        """True if node 0 ended without saying so."""
        return self._lost

    def _on_end(self, done: bool) -> None:
        self._lost = not done
        self._ended.set()
