"""A real Redis server on a free port, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_process import free_port


class RedisProcess:
    """Started and killed as the test says; keeps nothing on disk."""

    def __init__(self, folder: Path, options: Sequence[str] = (), client: Sequence[str] = ()) -> None:
        self.port = free_port()
        self._client = ["redis-cli", "-p", str(self.port), *client]
        self._command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", *options]
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        for _ in range(6000):
            if self.ask("PING") == "PONG":
                return
            time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def kill(self) -> None:
        """Ends the server as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, *words: str) -> str:
        """A command's reply, as redis-cli prints it."""
        environment = {**os.environ, "REDISCLI_AUTH": ""}
        done = subprocess.run(
            [*self._client, *words], check=False, capture_output=True, text=True, timeout=120, env=environment
        )
        return done.stdout.strip()

    def keys(self) -> list[str]:
        """Keys of all values."""
        return self.ask("--raw", "KEYS", "*").split()


@contextmanager
def running_redis(folder: Path, options: Sequence[str] = (), client: Sequence[str] = ()) -> Iterator[RedisProcess]:
    """A server while the block runs; skips the test where Redis is not installed."""
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip("needs redis-server and redis-cli")
    redis = RedisProcess(folder, options, client)
    redis.start()
    try:
        yield redis
    finally:
        redis.kill()
