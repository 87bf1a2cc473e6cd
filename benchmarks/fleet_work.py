"""CPU time of the processes and threads of a server with replicas, by their part in a request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from server_process import descendants, replicas


def thread_seconds(pid: int) -> dict[int, float]:
    """CPU time of each thread of a process, in seconds."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
        except OSError:  # it has ended
            continue
    return found


@dataclass(frozen=True)
class Work:
    """CPU seconds of each part."""

    client: float = 0.0
    """This process."""
    front: float = 0.0
    messages: float = 0.0
    """Threads of the replicas but for the engines'."""
    engines: float = 0.0
    others: float = 0.0
    """Processes of Ray."""
    wall: float = 0.0

    def minus(self, other: Work) -> Work:
        """Part by part."""
        return Work(**{name: value - vars(other)[name] for name, value in vars(self).items()})

    def per(self, count: float) -> Work:
        """The share of each of `count` equal things."""
        return Work(**{name: value / count for name, value in vars(self).items()})


@dataclass
class Threads:
    """Threads of the server, by their part."""

    server: int
    engines: set[int] = field(default_factory=set)
    replicas: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, server: int) -> Threads:
        """After some work: an engine's thread is the one of its process that has worked most since its start."""
        found = cls(server, replicas=replicas(server))
        for replica in found.replicas:
            used = thread_seconds(replica)
            del used[replica]  # the first thread runs Python
            found.engines.add(max(used, key=lambda thread: used[thread]))
        return found

    def work(self) -> Work:
        """Until now."""
        of_replicas = [item for replica in self.replicas for item in thread_seconds(replica).items()]
        engines = sum(seconds for thread, seconds in of_replicas if thread in self.engines)
        others = 0.0
        for process in set(descendants(self.server)) - set(self.replicas):
            try:
                others += sum(thread_seconds(process).values())
            except OSError:  # it has ended
                continue
        return Work(
            client=time.process_time(),
            front=sum(thread_seconds(self.server).values()),
            messages=sum(seconds for _, seconds in of_replicas) - engines,
            engines=engines,
            others=others,
            wall=time.perf_counter(),
        )
