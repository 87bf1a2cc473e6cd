"""Server subprocess for benchmarks: start, wait until ready, inspect, stop."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

KVANTA = (sys.executable, "-m", "kvanta", "serve")


@dataclass(frozen=True)
class ServerProcess:
    """A running server that is ready."""

    url: str
    pid: int
    start_s: float
    """From the start of the process to the first answer of /health."""
    log: int
    """Descriptor of the file that its output goes to."""

    def output(self) -> str:
        """Text that it and its descendants have written so far."""
        return os.pread(self.log, os.fstat(self.log).st_size, 0).decode("utf-8", "replace")

    def resident_bytes(self) -> int:
        """Resident memory of the process and its descendants, file pages included."""
        return sum(resident_bytes(pid) for pid in [self.pid, *descendants(self.pid)])


def resident_bytes(pid: int) -> int:
    """Resident bytes of one process; 0 if it has exited."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGESIZE")


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for child in map(int, task.read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def replicas(pid: int) -> list[int]:
    """Processes of the engines of `kvanta serve --replicas`."""
    found = []
    for child in descendants(pid):
        with suppress(OSError):  # it has ended
            if b"EngineReplica" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def health_seconds(url: str, timeout_s: float = 60.0) -> float:
    """Seconds of GET /health over a new connection. Raises OSError, also for any status other than 200."""
    place = urlsplit(url)
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(f"/health: {error!r}") from None
    finally:
        connection.close()
    if status != 200:
        raise OSError(f"/health answers {status}")
    return time.perf_counter() - begin


@contextmanager
def server_process(
    command: Sequence[str], port: int, *, start_timeout_s: float = 300.0, environment: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """Runs `command`, which must listen on `port` of 127.0.0.1. Its output is shown if it does not start."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **(environment or {})}, start_new_session=True
        )
        try:
            while True:
                try:
                    health_seconds(url, 5.0)
                    break
                except OSError:
                    waited = time.perf_counter() - begin
                if process.poll() is not None or waited > start_timeout_s:
                    log.seek(0)
                    said = log.read().decode("utf-8", "replace")[-4000:]
                    raise SystemExit(f"error: {' '.join(command)} does not answer after {waited:.0f} s:\n{said}")
                time.sleep(0.02)
            yield ServerProcess(url, process.pid, time.perf_counter() - begin, log.fileno())
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def write_report(report: Mapping[str, Any], file: Path | None) -> int:
    """Prints a report with "verdicts" and writes it to `file`. Returns the exit status: 0 if all are good."""
    for name, good in report["verdicts"].items():
        print(f"{'met   ' if good else 'FAILED'} {name}")
    text = json.dumps(report, indent=1, ensure_ascii=False)
    print(text)
    if file:
        file.write_text(text + "\n", encoding="utf-8")
    return 0 if all(report["verdicts"].values()) else 1
