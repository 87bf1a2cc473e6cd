"""Work of a server's event loop: CPU time of its thread for each callback, which other processes do not change."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live_server import LiveServer


class LoopWork:
    """The callbacks that took longest."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """CPU time of the longest callback."""
        self.callback = ""

    def add(self, seconds: float, handle: Any) -> None:
        """Counts one callback."""
        if seconds > self.seconds:
            task = getattr(handle._callback, "__self__", None)
            coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
            self.seconds, self.callback = seconds, getattr(coroutine, "__qualname__", repr(handle._callback))


@contextmanager
def loop_work(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWork]:
    """Measures while the context is open. Garbage is collected before, and not meanwhile."""
    found = LoopWork()
    thread = server.on_loop(threading.get_ident)
    run: Any = asyncio.Handle._run

    def measured(handle: Any) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        begin = time.thread_time()
        run(handle)
        found.add(time.thread_time() - begin, handle)

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", measured)
            yield found
    finally:
        gc.enable()
