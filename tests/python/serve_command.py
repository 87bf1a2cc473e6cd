"""`kvanta serve` as a process, and its clients."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2

COMMAND = [sys.executable, "-m", "kvanta", "serve"]
SMALL = ["--port", "0", "--threads", "1", "--kv-cache-memory-bytes", "8MiB"]
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


@contextmanager
def serving(*words: str, log: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    """The process, once it listens; ends it in any case. `log` gets the lines that it writes from then on."""
    process = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        seen = ""
        for line in process.stderr:
            seen += line
            if "serving " in line:
                break
        match = re.search(r"on (http://\S+),", seen)
        assert match, seen
        rest: list[str] = [] if log is None else log
        reader = threading.Thread(target=rest.extend, args=(process.stderr,))  # so that its log never blocks it
        reader.start()
        with httpx2.Client(base_url=match[1], timeout=120) as client:
            yield process, client
        process.kill()
        reader.join()
    finally:
        process.kill()
        process.wait()
