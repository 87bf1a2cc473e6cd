"""Processes that share a model: an engine as rank 0 here, and a child process for each other rank."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from kvanta import _core

_SCRIPT = str(Path(__file__).absolute().with_name("rank_process.py"))
_GRACE = 5.0  # seconds for a rank to end by itself
_GRACE_OF_LOST = 0.5  # where one does not answer
_AND_ENDS = ", and the engine ends: "  # in the words of the C++ communicator


def engine_with_ranks(config: _core.EngineConfig) -> tuple[_core.Engine, RankProcesses | None]:
    """An engine, and the processes of its other ranks where the configuration asks for them (rank_count).

    They end with the engine, and with this process, however it ends.
    """
    if rank_count(config) == 1:
        return _core.Engine(config), None
    ranks = RankProcesses(config)
    try:
        with _own_cpus(ranks.cpus[0]):
            return _core.Engine(config), ranks
    except BaseException:
        ranks.close()
        raise


def rank_count(config: Any) -> int:
    """Processes of an engine with this configuration, or with these EngineOptions."""
    return int((config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1))


class RankProcesses:
    """The ranks above 0."""

    def __init__(self, config: _core.EngineConfig) -> None:
        """Prepares `config`, whose engine then starts the processes. Threads are divided unless `config` has some."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lost = ""
        self._size = rank_count(config)
        self.cpus = _divide_cpus(self._size)
        """Of each rank; empty: there are fewer CPUs than ranks, and none has its own."""
        self._folder = tempfile.mkdtemp(prefix="kvanta-ranks-")
        config.rank_folder = self._folder
        if config.threads == 0:
            config.threads = max(1, len(self.cpus[0]))
        self._fields = _fields_of(config)
        self._ending = threading.Event()
        self.close = weakref.finalize(self, _end, self._folder, self.processes, self._ending)
        """Ends the processes."""
        this = weakref.ref(self)

        def start() -> None:
            ranks = this()
            if ranks is not None:
                ranks._start()

        config.set_start_ranks(start)

    @property
    def lost(self) -> str:
        """The first rank that was lost while the engine ran, and how; empty: none."""
        if not self._lost and not self._ending.is_set():
            # A rank that lives, but does not answer, was reported by another.
            for file in sorted(Path(self._folder).glob("rank-*.error")):
                with contextlib.suppress(OSError):
                    self._lose(int(file.stem.removeprefix("rank-")), file.read_text(encoding="utf-8"))
        return self._lost

    def _lose(self, rank: int, how: str) -> None:
        # A rank that ended because it lost another one says so.
        other = how.partition(_AND_ENDS)
        text = f"{other[0]}: {other[2]}" if other[1] else f"rank {rank} of {self._size} is lost: {how}"
        self._lost = self._lost or text

    def _start(self) -> None:
        for rank in range(1, self._size):
            fields = {**self._fields, "rank": rank}
            order = json.dumps({"config": fields, "cpus": self.cpus[rank]})
            # Isolated: it needs no package but this one, and finds it beside itself.
            process = subprocess.Popen([sys.executable, "-IS", _SCRIPT], stdin=subprocess.PIPE)
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
    file = Path(folder, f"rank-{rank}.error")
    how = f"its process was ended by {signal.Signals(-status).name}" if status < 0 else f"it exited with {status}"
    with contextlib.suppress(OSError):
        if file.exists():  # the rank's own words
            how = file.read_text(encoding="utf-8")
        else:
            unfinished = file.with_suffix(".text")
            unfinished.write_text(how, encoding="utf-8")
            unfinished.rename(file)
    owner._lose(rank, how)


def _end(folder: str, processes: list[subprocess.Popen[bytes]], ending: threading.Event) -> None:
    ending.set()
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
