"""The limit that leaves this process the least memory, who set it, and how much of it is in use: for error messages."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvanta.errors import ResourceError
from kvanta.terminal.tables import human_bytes

_UNLIMITED = 2**62  # of cgroups of version 1, which write a huge number


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes."""

    owner: str
    limit: int
    used: int

    def __str__(self) -> str:
        return f"{self.owner} {human_bytes(self.limit)}, of which {human_bytes(self.used)} are in use"


def memory_note(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> str:
    """The end of a message on memory that does not suffice; empty where the system does not say."""
    limits = [*_machine(proc), *_control_groups(proc, cgroups), *_address_space(proc)]
    tightest = min(limits, key=lambda each: each.limit - each.used, default=None)
    return "" if tightest is None else f"; {tightest}"


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process and its children may still take. Raises ResourceError where the system does not say."""
    free = [each.limit - each.used for each in (*_machine(proc), *_control_groups(proc, cgroups))]
    if not free:
        raise ResourceError("the system does not say how much memory is free; give --memory-budget")
    return max(0, min(free))


@contextmanager
def about_memory() -> Iterator[None]:
    """A ResourceError on memory that is raised within says which limit leaves so little."""
    try:
        yield
    except ResourceError as error:
        text = str(error)
        if "memory" not in text.lower():
            raise
        raise type(error)(text + memory_note()) from None


def _machine(proc: Path) -> Iterator[MemoryLimit]:
    sizes = {name: 1024 * size for name, size in _numbers(proc / "meminfo").items()}
    if "MemTotal:" in sizes and "MemAvailable:" in sizes:
        total = sizes["MemTotal:"]
        yield MemoryLimit("this machine has", total, total - sizes["MemAvailable:"])


def _control_groups(proc: Path, cgroups: Path) -> Iterator[MemoryLimit]:
    """Limits of the process's groups and of their ancestors. A container sees its own group at the mount's root."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        mount, (limit_name, usage_name, inactive) = cgroups / "memory", names
        if not controllers:
            mount, limit_name, usage_name, inactive = cgroups, "memory.max", "memory.current", "inactive_file"
        path = Path(group.lstrip("/"))
        for folder in (mount / path, *(mount / parent for parent in path.parents)):
            limit = _text(folder / limit_name).strip()
            if limit.isdecimal() and int(limit) < _UNLIMITED:
                used = int(_text(folder / usage_name) or 0) - _numbers(folder / "memory.stat").get(inactive, 0)
                yield MemoryLimit(f"the control group ({folder / limit_name}) allows", int(limit), max(0, used))


def _address_space(proc: Path) -> Iterator[MemoryLimit]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _text(proc / "self/statm").split()
    if limit != resource.RLIM_INFINITY and pages:
        yield MemoryLimit("ulimit -v allows", limit, int(pages[0]) * resource.getpagesize())


def _numbers(file: Path) -> dict[str, int]:
    """First word of each line -> the number after it."""
    words = [line.split() for line in _text(file).splitlines()]
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
