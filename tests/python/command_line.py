"""`kvanta` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

SMALL = ["--kv-cache-memory-bytes", "8MiB", "--threads", "1"]


def kvanta(*words: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    data = stdin if isinstance(stdin, bytes) else stdin.encode()
    done = subprocess.run(
        [sys.executable, "-m", "kvanta", *words],
        input=data,
        capture_output=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
