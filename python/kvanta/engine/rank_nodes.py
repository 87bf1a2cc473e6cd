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
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.errors import InputError, ResourceError, reason_of

_log = logging.getLogger("kvanta")
_KEY = "KVANTA_CLUSTER_KEY"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")
_UNFINISHED = (".new", ".text")
_MAX_FILE = 1 << 20
_POLL_S = 0.02
_GREETING_S = 10
"""Time that an end has for each message of the greeting."""
_MAX_GREETING = 4096
_MAX_GREETINGS = 64
"""At a time; more connections are closed."""
_ACCEPT_S = 0.2
_JOIN_S = 120
"""Least time that node 0 and the others wait for each other, as ranks do."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


@dataclass(frozen=True)
class Nodes:
    """The division of ranks among nodes, and the place of node 0."""

    count: int
    rank: int
    ranks: int
    """Number of ranks on all nodes."""
    address: str
    port: int

    @staticmethod
    def of(config: _core.EngineConfig) -> Nodes:
        """Raises InputError for numbers that do not fit together."""
        _core.check_nodes(config)
        address, _, port = config.master_addr.partition(":")
        if config.nnodes > 1 and address in ("", "0.0.0.0"):
            raise InputError(
                f"master_addr = {config.master_addr!r}: must be an address at which other nodes reach node 0"
            )
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise InputError(f"master_addr = {config.master_addr!r}: must be an address, or ADDRESS:PORT")
        ranks = _core.rank_count(config)
        return Nodes(config.nnodes, config.node_rank, ranks, address, int(port or config.master_port))

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(self.ranks * node // self.count, self.ranks * (node + 1) // self.count)


def _key() -> bytes:
    return os.environ.get(_KEY, "").encode()


def _facts(config: _core.EngineConfig, nodes: Nodes) -> dict[str, Any]:
    """Facts that all nodes must have in common before their ranks start, in addition to what ranks compare."""
    path = config.quantization_param_path
    try:
        scales = hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError as error:
        raise InputError(f"quantization_param_path = {path!r}: {reason_of(error)}") from None
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


@dataclass(frozen=True)
class RankLoss:
    """A rank that is lost, and why."""

    rank: int
    reason: str

    @staticmethod
    def read(file: Path) -> RankLoss:
        """The loss that a rank's file tells: its own, or that of another rank for which it ended. Raises OSError."""
        rank, _, reason = file.read_text(encoding="utf-8").partition("\n")
        return RankLoss(int(rank), reason)


def error_file(folder: str, rank: int) -> Path:
    """The file in which `rank` or its node tells why it ended, as the C++ library's ranks do (ReportRankLoss)."""
    return Path(folder, f"rank-{rank}.error")


def report_lost(folder: str, rank: int, how: str) -> None:
    """Tells the ranks of this node why one is lost, unless it has said so itself."""
    with contextlib.suppress(OSError):
        write_whole(error_file(folder, rank), f"{rank}\n{how}".encode())


def _connection(end: socket.socket) -> Connection:
    """The connection of a socket, which ends when the other machine is gone. Its greeting is limited in time."""
    end.settimeout(None)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        end.setsockopt(socket.IPPROTO_TCP, option, value)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _GREETING_S, 0))
    return Connection(end.detach())


def _greeted(connection: Connection) -> None:
    """Lifts the limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _prove(connection: Connection, *, first: bool) -> None:
    """Proves to each end that the other has the key, if this one has any."""
    if not (key := _key()):
        return
    steps = (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge)
    for step in steps:
        step(connection, key)


class _Refusals:
    """Logs refused connections, at most one line a second: anyone who reaches the port can cause them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._silent = 0

    def add(self, reason: str) -> None:
        """Logs it, or counts it for the next line."""
        with self._lock:
            if time.monotonic() < self._next:
                self._silent += 1
                return
            self._next = time.monotonic() + 1
            more = f" (and {self._silent} more since the last line)" if self._silent else ""
            self._silent = 0
        _log.warning("a connection to master_port is refused: %s%s", reason, more)


class NodeListener:
    """Node 0's end: waits for the other nodes."""

    def __init__(self, config: _core.EngineConfig, nodes: Nodes, folder: str) -> None:
        """Raises InputError if the port is taken, or the address is not this machine's."""
        self._nodes, self._folder = nodes, folder
        self._facts = _facts(config, nodes)
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._ending = False
        self._complete = threading.Event()
        self._refusals = _Refusals()
        try:
            self._socket = socket.create_server((nodes.address, nodes.port), backlog=16)
        except OSError as error:
            where = f"{nodes.address}:{nodes.port}"
            raise InputError(f"master_addr, master_port: cannot listen at {where}: {reason_of(error)}") from None
        self._socket.settimeout(_ACCEPT_S)
        address, self.port = self._socket.getsockname()[:2]
        _log.info("waiting for nodes 1 to %d at %s:%d", nodes.count - 1, nodes.address, self.port)
        if address.startswith("127."):
            _log.warning("%s is this machine alone: give --master-addr where nodes are machines", nodes.address)
        self._greetings = threading.Semaphore(_MAX_GREETINGS)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Tells the nodes that the engine ends, and gives the port back."""
        with self._lock:
            self._ending = True
            links = list(self._links.values())
        self._accepting.join()
        for link in links:
            link.close()

    def _accept(self) -> None:
        """Until all nodes have come: nobody else has to reach this port."""
        with contextlib.closing(self._socket):
            while not self._ending and not self._complete.is_set():
                self._accept_one()

    def _accept_one(self) -> None:
        try:
            end = self._socket.accept()[0]
        except TimeoutError:
            return
        except OSError:  # of the connection, or no file is left
            time.sleep(_POLL_S)
            return
        if not self._greetings.acquire(blocking=False):
            end.close()
            return
        try:
            threading.Thread(target=self._greet, args=(_connection(end),), daemon=True).start()
        except (OSError, RuntimeError):  # no thread is left
            self._greetings.release()
            end.close()

    def _greet(self, connection: Connection) -> None:
        try:
            _prove(connection, first=True)
            facts = json.loads(connection.recv_bytes(_MAX_GREETING))
            node = facts.get("node") if isinstance(facts, dict) else None
            if not (type(node) is int and 0 < node < self._nodes.count):
                raise ValueError(f"node must be between 1 and {self._nodes.count - 1}, got {node!r:.50}")
            if not (error := self._difference(node, facts)):
                self._join(node, connection)
                return
            self._refusals.add(f"node {node}: {error:.400}")
            connection.send_bytes(json.dumps({"error": error}).encode())
        except (OSError, EOFError, ValueError, RecursionError, AuthenticationError) as error:
            self._refusals.add(f"{error!r:.200}")
        finally:
            self._greetings.release()
        connection.close()

    def _difference(self, node: int, facts: Mapping[str, Any]) -> str:
        """The reason for which a node is refused, or none."""
        for name, own in self._facts.items():
            if facts.get(name) != own:
                return f"node {node} has {name} = {facts.get(name)!r}, and node 0 has {own!r}; both must have the same"
        return ""

    def _join(self, node: int, connection: Connection) -> None:
        """Takes the node, or asks it to reconnect: an earlier one, or this engine, is about to end."""
        with self._lock:
            takes = not self._ending and node not in self._links
            connection.send_bytes(json.dumps({"error": "", "retry": not takes}).encode())
            if not takes:
                connection.close()
                return
            _greeted(connection)
            link = _Link(connection, self._folder, lambda done: self._on_end(node, done))
            self._links[node] = link
            link.start()
            if len(self._links) == self._nodes.count - 1:
                self._complete.set()
        _log.info("node %d has come", node)

    def _on_end(self, node: int, done: bool) -> None:
        if self._ending:
            return
        how = "ended its ranks" if done else "closed its connection, or the network failed"
        for rank in self._nodes.ranks_of(node):
            report_lost(self._folder, rank, f"its node, {node} of {self._nodes.count}, {how}")


class NodeConnection:
    """Another node's end."""

    def __init__(self, config: _core.EngineConfig, nodes: Nodes) -> None:
        """Waits for node 0. Raises InputError if that refuses this node, ResourceError if it does not come."""
        self._ended = threading.Event()
        self._lost = False
        self._link: _Link | None = None
        greeting = json.dumps({"node": nodes.rank, **_facts(config, nodes)}).encode()
        limit = max(_JOIN_S, config.distributed_timeout_seconds)
        deadline = time.monotonic() + limit
        while (reason := self._greet(nodes, greeting)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if reason:
            where = f"{nodes.address}:{nodes.port}"
            raise ResourceError(f"node 0 does not take this node within {limit} seconds at {where}: {reason}")

    def _greet(self, nodes: Nodes, greeting: bytes) -> str:
        """The reason for which node 0 may take this node later, or none: it has. Raises InputError if it never will."""
        try:
            end = socket.create_connection((nodes.address, nodes.port), _GREETING_S)
            address = end.getsockname()[0]
            connection = _connection(end)
        except OSError as error:
            return reason_of(error)
        try:
            _prove(connection, first=False)
            connection.send_bytes(greeting)
            answer = json.loads(connection.recv_bytes(_MAX_FILE))
        except (OSError, EOFError) as error:
            connection.close()
            return f"{error or type(error).__name__}; do both have the same {_KEY}?"
        except (ValueError, AuthenticationError) as error:
            raise InputError(f"node 0 does not take this node: {error}; do both have the same {_KEY}?") from None
        if answer["error"]:
            raise InputError(answer["error"])
        if answer["retry"]:
            connection.close()
            return f"it has a node {nodes.rank} already, or ends"
        _greeted(connection)
        self._connection = connection
        self.address = str(address)
        """Address of this machine at which node 0 reaches it."""
        return ""

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
