"""Process of one rank above 0, started by kvanta.engine.ranks as a script.

Reads one line of JSON, {"config": fields of EngineConfig, "cpus": [...], "nccl": library or ""}, from its standard
input, which stays open as long as the parent lives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import types
from pathlib import Path


def _skip_front() -> None:
    """Replaces the package's __init__, whose imports take longer than a rank takes to load a small model."""
    package = types.ModuleType("kvanta")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["kvanta"] = package


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> int:
    """Returns the exit status. The parent tells its user why a rank has ended."""
    _skip_front()
    from kvanta import _core

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])
    if order["nccl"]:
        from kvanta.engine import nccl

        nccl.load(order["nccl"])
    config = _core.EngineConfig()
    for name, value in order["config"].items():
        setattr(config, name, value)
    try:
        _core.run_rank(config)
    except (ValueError, RuntimeError, MemoryError):
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread that waits for the parent must not delay the end
