"""`kvanta` in this process, and as a user starts it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from unittest.mock import patch

from kvanta.cli import main

SMALL = ["--kv-cache-memory-bytes", "8MiB", "--threads", "1"]


@contextmanager
def _default_warnings() -> Iterator[None]:
    """Filters of a Python that pytest has not changed."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield


def kvanta(*words: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without the second that a new interpreter takes for its imports.

    Text that the interpreter itself or C would write, and exits of processes, need kvanta_process.
    """
    data = stdin if isinstance(stdin, bytes) else stdin.encode()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with (
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")),
        patch.dict(os.environ, environment),
        redirect_stdout(out),
        redirect_stderr(err),
        _default_warnings(),
    ):
        try:
            status = main(words)
        except SystemExit as leave:  # argparse, after its help
            status = int(leave.code or 0)
    written = []
    for stream in (out, err):
        stream.seek(0)
        written.append(stream.read())
    return subprocess.CompletedProcess(["kvanta", *words], status, *written)


def kvanta_process(*words: str, stdin: str | bytes = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a separate process."""
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
