"""Soak test of a server at four times its capacity, with clients that disconnect or send malformed requests.

    python benchmarks/soak.py smollm2 --minutes 10 --json docs/results/soak.json

Starts a server. The idle server answers some questions; then its maximum rate is measured; then --clients arrive at
four times that rate: a quarter of them disconnect before their answer is complete, a tenth send malformed requests of
every endpoint, and a twentieth proper ones that cost much to read or to answer (soak_attacks.py). At the end

* every answer is that of the idle server, byte for byte, or a proper error,
* no page of the cache is in use, and no request runs or waits,
* the server's memory has stopped growing between the second and the last fifth of the time,
* every GET /health took less than 100 ms, measured by a separate process twenty times per second.

Exits with status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import re
import shlex
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from server_process import KVANTA, ServerProcess, health_seconds, resident_bytes, server_process, write_report
from soak_clients import OUTCOMES, Clients, idle_answers, make_questions

from kvanta.loadgen.client import fetch_text, open_session
from kvanta.loadgen.summary import distribution, peak_concurrency
from kvanta.loadgen.target import find_target

OVERLOAD = 4
HEALTH_MS = 100.0
MOST_GROWTH = 0.03
_PROBE_SECONDS = 0.05


def watch(url: str, pid: int, ends: Connection) -> None:
    """Subprocess that samples seconds of /health (None: failed) and bytes of memory until `ends` is written to."""
    seen: list[tuple[float, float | None, int]] = []
    begin = time.perf_counter()
    while not ends.poll(_PROBE_SECONDS):
        try:
            taken: float | None = health_seconds(url)
        except OSError:
            taken = None
        seen.append((time.perf_counter() - begin, taken, resident_bytes(pid)))
    ends.send(seen)


class Watcher:
    """The process that runs watch()."""

    def __init__(self, server: ServerProcess) -> None:
        self._here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(target=watch, args=(server.url, server.pid, there), daemon=True)
        self._process.start()

    def end(self) -> list[tuple[float, float | None, int]]:
        """Ends the process; returns its samples."""
        self._here.send(None)
        seen: list[tuple[float, float | None, int]] = self._here.recv()
        self._process.join()
        return seen


def health_figures(seen: list[tuple[float, float | None, int]]) -> dict[str, Any]:
    """Latency of /health in milliseconds."""
    taken = [seconds for _, seconds, _ in seen if seconds is not None]
    return {"asked": len(seen), "failed": len(seen) - len(taken), **(distribution(taken) or {})}


def memory_figures(seen: list[tuple[float, float | None, int]]) -> dict[str, Any]:
    """Median resident bytes in each fifth of the time."""
    fifths = [[resident for *_, resident in seen[len(seen) * i // 5 : len(seen) * (i + 1) // 5]] for i in range(5)]
    medians = [int(statistics.median(each)) for each in fifths]
    return {"fifths_bytes": medians, "growth": medians[4] / medians[1] - 1}


async def left_over(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """Resources of the idle server after its prefix cache is reset; all 0 unless something leaks."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_pages_used", "kv_cache_exact_pages_used")
    await fetch_text(session, "POST", f"{url}/reset_prefix_cache")
    text = await fetch_text(session, "GET", f"{url}/metrics")
    values = dict(re.findall(r"^kvanta:(\w+)\{.*\} (\S+)$", text, re.MULTILINE))
    return {name: int(float(values[name])) for name in names}


async def soak(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Runs the soak test; returns the report."""
    async with open_session(options.timeout, None) as session:
        target = await find_target(session, server.url)
        questions = make_questions(target.ids, options.questions, options.input_len, options.output_len, options.seed)
        answers = await idle_answers(session, server.url, questions)
        fair = Clients(session, server.url, questions, answers, seed=options.seed, polite=True)
        _, seconds = await fair.run(options.warm_up, math.inf, options.warm_up)
        rate = options.warm_up / seconds
        print(f"serves {rate:.2f} requests/s; {options.minutes:g} minutes of {OVERLOAD} times that", flush=True)
        clients = Clients(session, server.url, questions, answers, seed=options.seed + 1, patience_s=options.patience)
        watcher = Watcher(server)
        visits = math.ceil(OVERLOAD * rate * 60 * options.minutes)
        records, seconds = await clients.run(visits, OVERLOAD * rate, options.clients)
        seen = watcher.end()
        left = await left_over(session, server.url)
        again = await idle_answers(session, server.url, questions)
    findings = clients.findings
    health, memory = health_figures(seen), memory_figures(seen)
    return {
        "command": shlex.join(["benchmarks/soak.py", *sys.argv[1:]]),
        "model": options.model,
        "clients": options.clients,
        "served_rate": rate,
        "offered_rate": visits / max(record.ready_s for record in records),
        "duration_s": seconds,
        "visits": visits,
        "most_on_their_way": peak_concurrency(records),
        "outcomes": {name: findings.outcomes[name] for name in OUTCOMES},
        "examples": findings.examples,
        "health_ms": health,
        "memory": memory,
        "left_over": left,
        "verdicts": {
            "every answer right or a proper error": findings.count("wrong", "improper") == 0
            and fair.findings.count("right") == options.warm_up,
            "answers those of an idle server, before and after": findings.count("wrong") == 0 and again == answers,
            "nothing runs, waits or holds a page": not any(left.values()),
            "memory flat": memory["growth"] < MOST_GROWTH,
            f"/health below {HEALTH_MS:g} ms": not health["failed"] and health.get("max", math.inf) < HEALTH_MS,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--questions", type=int, default=32, help="different prompts")
    parser.add_argument("--input-len", type=int, nargs=2, default=(16, 192), metavar=("LEAST", "MOST"))
    parser.add_argument("--output-len", type=int, nargs=2, default=(8, 48), metavar=("LEAST", "MOST"))
    parser.add_argument("--warm-up", type=int, default=128, metavar="N", help="requests that measure the rate")
    parser.add_argument("--patience", type=float, default=20, metavar="S", help="maximum delay of disconnects")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="timeout of one request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8600)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="further options of kvanta serve, in one word")
    parser.add_argument("--memory", default="256MiB", help="size of the cache; a larger one takes long to fill")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    queued = options.clients // 4  # keeps the queue full most of the time
    command = [*KVANTA, options.model, "--port", str(options.port), "--max-queued-requests", str(queued)]
    command += ["--kv-cache-memory-bytes", options.memory]
    with server_process([*command, *shlex.split(options.serve)], options.port) as server:
        report = asyncio.run(soak(server, options))
    return write_report(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
