"""Load on replicas in a Ray cluster whose head loses its global control store (GCS) for a while.

    python benchmarks/head_restart.py stories260k --json docs/results/head-restart.json

Starts Redis, a Ray head that keeps its state there, and `kvanta serve --replicas` in that cluster. While --clients ask,
half of them as streams, the GCS gets SIGKILL, stays away for --away seconds, and is started again; afterwards a replica
is killed, which the restarted GCS has to replace. Exits with status 1 if a request is lost, an answer is not that of
one engine, or the replica is not replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prefill_decode import redis_server
from replicas import TEMPERATURE, Tally, client, quiet_answers
from server_process import KVANTA, ServerProcess, descendants, free_port, replicas, server_process
from soak_clients import Answer, make_questions

QUESTIONS = 24
REPLACE_SECONDS = 60.0
RAY = str(Path(sys.executable).with_name("ray"))


class RayHead:
    """A head whose processes are known by the folder that it writes to."""

    def __init__(self, folder: str, redis_url: str) -> None:
        self._folder = folder
        self._redis = redis_url.removeprefix("redis://")
        self.port = free_port()
        self.access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """Environment of all that belong to the cluster."""

    def start(self) -> None:
        """Returns when the head takes connections."""
        environment = {**os.environ, **self.access, "RAY_REDIS_ADDRESS": self._redis, "RAY_USAGE_STATS_ENABLED": "0"}
        place = ["--node-ip-address=127.0.0.1", f"--port={self.port}", f"--temp-dir={self._folder}"]
        words = [RAY, "start", "--head", "--num-cpus=8", "--include-dashboard=false", *place]
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)

    def processes(self, name: str = "") -> list[tuple[int, list[bytes]]]:
        """Ids and words of the head's processes, all or of one program, but for workers, which are the raylet's."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")[:-1]
                own = any(self._folder.encode() in word for word in words) and int(process.name) != os.getpid()
                if own and words[0].endswith(name.encode()):
                    found.append((int(process.name), words))
        return found

    def replicas(self) -> list[int]:
        """Processes of engines."""
        return replicas(self.processes("/raylet")[0][0])

    async def lose_gcs(self, seconds: float) -> None:
        """Kills the GCS, and starts it again after some time."""
        [(pid, words)] = self.processes("/gcs_server")
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(seconds)
        environment = dict(each.split(b"=", 1) for each in variables if b"=" in each)
        subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def replace_replica(self) -> float:
        """Kills a replica; seconds until there are as many processes again. Infinite: they do not come."""
        before = self.replicas()
        os.kill(before[0], signal.SIGKILL)
        begin = time.perf_counter()
        while (seconds := time.perf_counter() - begin) < REPLACE_SECONDS:
            await asyncio.sleep(0.2)
            now = self.replicas()
            if before[0] not in now and len(now) == len(before):
                return seconds
        return math.inf

    def stop(self) -> None:
        """Ends all of its processes."""
        heads = [pid for pid, _ in self.processes()]
        for pid in [*(worker for head in heads for worker in descendants(head)), *heads]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_head(redis_url: str) -> Iterator[RayHead]:
    """A head, while the block runs."""
    with tempfile.TemporaryDirectory(prefix="kvanta-head-", ignore_cleanup_errors=True) as folder:
        head = RayHead(folder, redis_url)
        try:
            head.start()
            yield head
        finally:
            head.stop()


async def run(
    server: ServerProcess, head: RayHead, bodies: list[dict[str, Any]], answers: list[Answer], values: Any
) -> tuple[Tally, Tally, float]:
    """Outcomes of the requests that ended while the GCS was away, of all others, and the time to replace a replica."""
    away, there = Tally(), Tally()
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def load(tally: Tally, work: Coroutine[Any, Any, Any]) -> Any:
            """Clients, until the work is done."""
            working = asyncio.create_task(work)
            while not working.done():
                end = time.perf_counter() + 1.0
                await asyncio.gather(
                    *(client(session, server.url, bodies, answers, tally, end) for _ in range(values.clients))
                )
            return await working

        await load(there, asyncio.sleep(values.before))
        await load(away, head.lose_gcs(values.away))
        await load(there, asyncio.sleep(values.before))
        seconds = await load(there, head.replace_replica())
    return away, there, seconds


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--before", type=float, default=5.0, metavar="SECONDS", help="of load, before and after [5]")
    parser.add_argument("--away", type=float, default=10.0, metavar="SECONDS", help="without the GCS [10]")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--json", type=Path)
    values = parser.parse_args()
    questions = make_questions(range(3, 500), QUESTIONS, (8, 120), (20, 100), seed=1)
    bodies = [each.body(temperature=TEMPERATURE * (i % 2), seed=i) for i, each in enumerate(questions)]
    command = [*KVANTA, values.model, "--no-log-requests", "--threads", "1", "--kv-cache-memory-bytes", "64MiB"]
    port = free_port()
    with server_process([*command, "--port", str(port)], port) as server:
        answers = asyncio.run(quiet_answers(server.url, bodies))
    port = free_port()
    command += ["--port", str(port), "--replicas", str(values.replicas)]
    with redis_server() as redis, ray_head(redis) as head:
        environment = {**head.access, "RAY_ADDRESS": f"127.0.0.1:{head.port}"}
        with server_process(command, port, environment=environment) as server:
            away, there, seconds = asyncio.run(run(server, head, bodies, answers, values))
    every = away.outcomes + there.outcomes
    row = {
        "away_s": values.away,
        "requests": every.total(),
        "requests_while_away": away.outcomes.total(),
        "wrong": every["wrong"],
        "lost": every["lost"],
        "longest_pause_s": round(max(away.pauses + there.pauses, default=0.0), 3),
        "replica_replaced_s": round(seconds, 1) if seconds < math.inf else None,
    }
    figures = {"model": values.model, "replicas": values.replicas, "clients": values.clients, "rows": [row]}
    print(json.dumps(figures, indent=1))
    for fault in (away.faults + there.faults)[:10]:
        print(fault, file=sys.stderr)
    if values.json:
        values.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if every["wrong"] or every["lost"] or not away.outcomes["right"] or seconds == math.inf else 0


if __name__ == "__main__":
    sys.exit(main())
