"""Processes that share a model: an engine as rank 0 here, and a child process for each other rank of this machine."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.engine import nccl
from kvanta.engine.rank_nodes import NodeConnection, NodeListener, Nodes, RankLoss, error_file, report_lost
from kvanta.errors import InputError, ResourceError, reason_of

_log = logging.getLogger("kvanta")
_SCRIPT = str(Path(__file__).absolute().with_name("rank_process.py"))
_GRACE = 5.0  # seconds for a rank to end by itself
_GRACE_OF_LOST = 0.5  # where one does not answer
_POLL_S = 0.1
_PREFIX = "kvanta-ranks-"
_LOCK = ".lock"


def engine_with_ranks(config: _core.EngineConfig) -> tuple[_core.Engine, RankProcesses | None]:
    """An engine, and the processes of its other ranks where the configuration has several (_core.rank_count).

    They end with the engine, and with this process, however it ends.
    """
    if config.node_rank > 0:
        raise InputError(
            f"node_rank = {config.node_rank}: `kvanta serve` runs the ranks of such a node; here it must be 0"
        )
    if _core.rank_count(config) == 1:
        return _core.Engine(config), None
    ranks = RankProcesses(config)
    try:
        with _exit_at_sigterm():
            return ranks.make_engine(config), ranks
    except BaseException:
        ranks.close()
        raise


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Raises SystemExit for a SIGTERM that would end the process at once, and leave its folder."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def serve_node(config: _core.EngineConfig) -> int:
    """Runs the ranks of a node other than 0 until the engine ends. Returns the exit status.

    Raises InputError and ResourceError for a node 0 that does not take this node, or does not come.
    """
    ranks = RankProcesses(config)
    node = ranks.connection
    assert node is not None
    with contextlib.closing(ranks):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # closes them
        ranks.start()
        while not node.wait(_POLL_S) and not ranks.lost and not ranks.have_ended:
            pass
        if ranks.lost:
            time.sleep(_GRACE_OF_LOST)  # the reason reaches the other nodes
        lost = ranks.lost or ("node 0 closed its connection, or the network failed" if node.lost else "")
    if not lost:
        _log.info("node 0 has ended, and so do its ranks here")
        return 0
    _log.error("%s", lost)
    return 1


class RankProcesses:
    """The ranks above 0 on this machine."""

    def __init__(self, config: _core.EngineConfig) -> None:
        """Prepares `config`, whose engine then starts the processes. Threads are divided unless `config` has some."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lost = ""
        nodes = Nodes.of(config)
        self._size = nodes.ranks
        self._local = nodes.ranks_of(nodes.rank)
        self.cpus = _divide_cpus(len(self._local))
        """CPUs of each rank of this machine; empty: there are fewer CPUs than ranks, so they share."""
        self._nccl = nccl.nccl_library() if config.device == "cuda" else ""
        self.connection = NodeConnection(config, nodes) if nodes.rank > 0 else None
        """Connection to node 0, on any other node."""
        _remove_left_folders()
        self._folder = tempfile.mkdtemp(prefix=_PREFIX)
        lock = _lock(self._folder)
        self._ending = threading.Event()
        others: list[NodeListener | NodeConnection] = []
        self.close = weakref.finalize(self, _end, self._folder, lock, self.processes, self._ending, others)
        """Ends the processes."""
        if self.connection is not None:
            others.append(self.connection)
            self.connection.start(self._folder)
            config.rank_address = self.connection.address
        elif nodes.count > 1:
            others.append(NodeListener(config, nodes, self._folder))
            config.rank_address = nodes.address
        config.rank_folder = self._folder
        if config.threads == 0:
            config.threads = max(1, len(self.cpus[0]))
        self._fields = _fields_of(config)
        this = weakref.ref(self)

        def start() -> None:
            ranks = this()
            if ranks is not None:
                ranks.start()

        config.set_start_ranks(start)

    @property
    def have_ended(self) -> bool:
        """True once all processes have ended by themselves."""
        return all(process.poll() is not None for process in self.processes)

    @property
    def lost(self) -> str:
        """The first rank that was lost while the engine ran, and how; empty: none."""
        if not self._lost and not self._ending.is_set():
            # A rank that lives, but does not answer, was reported by another.
            for file in sorted(Path(self._folder).glob("rank-*.error")):
                with contextlib.suppress(OSError):
                    self._lose(RankLoss.read(file))
        return self._lost

    def make_engine(self, config: _core.EngineConfig) -> _core.Engine:
        """Rank 0's engine. It is made on another thread: this one sees signals while the engine waits for its ranks."""
        made: list[_core.Engine | BaseException] = []

        def make() -> None:
            try:
                nccl.load(self._nccl)
                with _own_cpus(self.cpus[0]):
                    made.append(_core.Engine(config))
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            report_lost(self._folder, self._size - 1, "rank 0 was interrupted")  # it then waits no longer
            thread.join(_GRACE)
            raise
        if isinstance(made[0], BaseException):
            raise made[0]
        return made[0]

    def _lose(self, loss: RankLoss) -> None:
        self._lost = self._lost or f"rank {loss.rank} of {self._size} is lost: {loss.reason}"

    def start(self) -> None:
        """Starts the processes; rank 0's engine does it after its checks."""
        for rank in self._local:
            if rank == 0:
                continue
            fields = {**self._fields, "rank": rank}
            cpus = self.cpus[rank - self._local.start]
            order = json.dumps({"config": fields, "cpus": cpus, "nccl": self._nccl})
            # Isolated: it needs no package but this one, and finds it in its own folder.
            try:
                process = subprocess.Popen([sys.executable, "-IS", _SCRIPT], stdin=subprocess.PIPE)
            except OSError as error:  # too many processes, or no memory
                raise ResourceError(f"rank {rank} cannot be started: {reason_of(error)}") from None
            self.processes.append(process)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its end is reported below
                process.stdin.write(order.encode() + b"\n")
                process.stdin.flush()
            threading.Thread(
                target=_watch, args=(weakref.ref(self), rank, process, self._folder, self._ending), daemon=True
            ).start()


def _watch(
    ranks: weakref.ref[RankProcesses],
    rank: int,
    process: subprocess.Popen[bytes],
    folder: str,
    ending: threading.Event,
) -> None:
    """Waits for the end of a rank and tells the other ranks the reason."""
    status = process.wait()
    owner = ranks()
    if ending.is_set() or owner is None or status == 0:
        return
    how = f"its process was ended by {signal.Signals(-status).name}" if status < 0 else f"it exited with {status}"
    report_lost(folder, rank, how)
    loss = RankLoss(rank, how)
    with contextlib.suppress(OSError):
        loss = RankLoss.read(error_file(folder, rank))  # the rank's own words, where it had any
    owner._lose(loss)


def _lock(folder: str) -> int:
    """Marks a folder as one that is in use, until the returned descriptor is closed or the process ends."""
    unlocked = Path(folder, _LOCK + ".new")
    descriptor = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(unlocked.with_name(_LOCK))
    return descriptor


def _remove_left_folders() -> None:
    """Removes the folders of engines whose process has died without doing it."""
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or in use
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
            finally:
                os.close(descriptor)


def _end(
    folder: str,
    lock: int,
    processes: list[subprocess.Popen[bytes]],
    ending: threading.Event,
    nodes: list[NodeListener | NodeConnection],
) -> None:
    ending.set()
    for each in nodes:
        each.close()
    lost = any(Path(folder).glob("rank-*.error"))
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    for process in processes:
        try:
            process.wait(_GRACE_OF_LOST if lost else _GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _fields_of(config: _core.EngineConfig) -> dict[str, Any]:
    """The options of a configuration, without its callables."""
    names = (name for name in dir(config) if not name.startswith(("_", "set_")))
    return {name: getattr(config, name) for name in names}


def _divide_cpus(ranks: int) -> list[list[int]]:
    """Consecutive CPUs for each rank, those of one NUMA node together; none where there are fewer than ranks."""
    allowed = os.sched_getaffinity(0)
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    ordered: list[int] = []
    for node in nodes:
        with contextlib.suppress(OSError, ValueError):
            ordered += [cpu for cpu in _cpu_list((node / "cpulist").read_text()) if cpu in allowed]
    ordered += sorted(allowed - set(ordered))
    if len(ordered) < ranks:
        return [[] for _ in range(ranks)]
    return [ordered[len(ordered) * rank // ranks : len(ordered) * (rank + 1) // ranks] for rank in range(ranks)]


def _cpu_list(text: str) -> list[int]:
    """CPUs of the kernel's lists, "0-3,8"."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


@contextlib.contextmanager
def _own_cpus(cpus: list[int]) -> Any:
    """Threads that are started inside, the engine's, stay on these CPUs; the caller's thread gets its own back."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
