"""Two nodes of one machine: network namespaces, joined by a link of a limited rate. Needs root and iproute2."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = ("kvanta-0", "kvanta-1")
ADDRESSES = ("10.71.0.1", "10.71.0.2")


@contextmanager
def two_nodes(mbit: int) -> Iterator[None]:
    """Makes the namespaces; each end of the link sends at most `mbit` megabits per second."""
    _remove()
    try:
        for node in NODES:
            _ip("netns", "add", node)
        _ip("link", "add", "link-0", "netns", NODES[0], "type", "veth", "peer", "name", "link-1", "netns", NODES[1])
        for number, (node, address) in enumerate(zip(NODES, ADDRESSES, strict=True)):
            _ip("-n", node, "addr", "add", f"{address}/24", "dev", f"link-{number}")
            _ip("-n", node, "link", "set", f"link-{number}", "up")
            _ip("-n", node, "link", "set", "lo", "up")
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", node, "qdisc", "add", "dev", f"link-{number}", "root", *limit], check=True)
        yield
    finally:
        _remove()


def enter(node: int) -> None:
    """Moves this thread, and those that it starts, to a node."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", NODES[node]).open(encoding="ascii") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _remove() -> None:
    for node in NODES:
        subprocess.run(["ip", "netns", "del", node], check=False, stderr=subprocess.DEVNULL)
