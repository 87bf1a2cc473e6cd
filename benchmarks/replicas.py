"""Load on several replicas, one of which is killed every so often.

    python benchmarks/replicas.py smollm2 --replicas 3 --minutes 10 --json docs/results/replicas.json

A server with one engine answers the questions first, sampled ones with seeds. Then --clients ask a server with
--replicas for --minutes, half of them as streams, while every --kill-every seconds a replica gets SIGKILL. Exits with
status 1 if a request is lost: an error, a stream that ends early, or an answer that is not that of one engine; and if
no replica was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from server_process import KVANTA, ServerProcess, free_port, replicas, server_process
from soak_clients import Answer, Question, make_questions

from kvanta.loadgen.sse import EventReader

TEMPERATURE = 0.8
QUESTIONS = 48


@dataclass
class Tally:
    """Outcomes of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    """Longest time without an event, of each stream, in seconds."""
    faults: list[str] = field(default_factory=list)
    tokens: int = 0


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """The whole answer. Raises OSError for any other outcome."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise OSError(f"status {response.status}: {(await response.text())[:200]}")
        choice = (await response.json())["choices"][0]
        return Answer(choice["text"], tuple(choice["token_ids"]))


async def follow(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[Answer, float]:
    """The answer as a stream, and its longest pause in seconds."""
    reader, text, tokens, done = EventReader(), "", list[int](), False
    last, pause = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/completions", json={**body, "stream": True}) as response:
        if response.status != 200:
            raise OSError(f"status {response.status}: {(await response.text())[:200]}")
        async for received in response.content.iter_any():
            now = time.perf_counter()
            last, pause = now, max(pause, now - last)
            for data in reader.feed(received):
                done = done or data == "[DONE]"
                event = {"choices": []} if data == "[DONE]" else json.loads(data)
                if "error" in event:
                    raise OSError(f"the stream ends with {event['error']}")
                for choice in event["choices"]:
                    text += choice["text"]
                    tokens += choice.get("token_ids") or []
    if not done:
        raise OSError("the stream ends early")
    return Answer(text, tuple(tokens)), pause


async def client(
    session: aiohttp.ClientSession,
    url: str,
    bodies: list[dict[str, Any]],
    answers: list[Answer],
    tally: Tally,
    end: float,
) -> None:
    """Asks one question after the other until `end`, of time.perf_counter()."""
    chance = random.Random()
    while time.perf_counter() < end:
        number = chance.randrange(len(bodies))
        try:
            if chance.random() < 0.5:
                answer, pause = await follow(session, url, bodies[number])
                tally.pauses.append(pause)
            else:
                answer = await ask(session, url, bodies[number])
        except (OSError, aiohttp.ClientError, ValueError) as error:
            tally.outcomes["lost"] += 1
            tally.faults.append(f"{type(error).__name__}: {error}")
            continue
        right = answer == answers[number]
        tally.outcomes["right" if right else "wrong"] += 1
        tally.tokens += len(answer.tokens)


async def killer(server: ServerProcess, every: float, end: float) -> int:
    """Kills a replica now and then; returns how many."""
    killed = 0
    while time.perf_counter() + every < end:
        await asyncio.sleep(every)
        victims = replicas(server.pid)
        if victims:
            os.kill(random.choice(victims), signal.SIGKILL)
            killed += 1
            print(f"killed replica {killed}; {len(victims) - 1} left", file=sys.stderr, flush=True)
    return killed


async def run(
    server: ServerProcess, bodies: list[dict[str, Any]], answers: list[Answer], values: Any
) -> tuple[Tally, int]:
    """The load."""
    tally, end = Tally(), time.perf_counter() + 60 * values.minutes
    limit = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        killing = asyncio.create_task(killer(server, values.kill_every, end))
        await asyncio.gather(*(client(session, server.url, bodies, answers, tally, end) for _ in range(values.clients)))
        return tally, await killing


async def quiet_answers(url: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """One after the other."""
    async with aiohttp.ClientSession() as session:
        return [await ask(session, url, body) for body in bodies]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-every", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(8, 120))
    parser.add_argument("--new-tokens", type=int, nargs=2, default=(20, 200))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="further options of kvanta serve")
    values = parser.parse_args()
    questions: list[Question] = make_questions(
        range(3, 500), QUESTIONS, tuple(values.prompt_tokens), tuple(values.new_tokens), seed=1
    )
    bodies = [each.body(temperature=TEMPERATURE * (i % 2), seed=i) for i, each in enumerate(questions)]
    command = [*KVANTA, values.model, "--no-log-requests", *values.serve]
    port = free_port()
    with server_process([*command, "--port", str(port)], port) as server:
        answers = asyncio.run(quiet_answers(server.url, bodies))
    port = free_port()
    with server_process([*command, "--port", str(port), "--replicas", str(values.replicas)], port) as server:
        tally, killed = asyncio.run(run(server, bodies, answers, values))
    pauses = sorted(tally.pauses)
    figures = {
        "model": values.model,
        "replicas": values.replicas,
        "minutes": values.minutes,
        "clients": values.clients,
        "killed": killed,
        "requests": tally.outcomes.total(),
        "right": tally.outcomes["right"],
        "wrong": tally.outcomes["wrong"],
        "lost": tally.outcomes["lost"],
        "tokens_per_second": round(tally.tokens / (60 * values.minutes), 1),
        "longest_pause_s": {"median": _at(pauses, 0.5), "p99": _at(pauses, 0.99), "max": _at(pauses, 1.0)},
    }
    print(json.dumps(figures, indent=1))
    for fault in tally.faults[:10]:
        print(fault, file=sys.stderr)
    if values.json:
        values.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if tally.outcomes["wrong"] or tally.outcomes["lost"] or not tally.outcomes["right"] or not killed else 0


def _at(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


if __name__ == "__main__":
    sys.exit(main())
