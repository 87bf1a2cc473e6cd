"""benchmarks/soak.py on the shipped model: clients that disconnect, send malformed requests and overload it."""

import asyncio
import math

import pytest
import soak
from live_server import LiveServer, live_server
from soak_clients import Answer, Clients, Question, idle_answers, make_questions

from kvanta.loadgen.client import open_session

QUESTIONS = make_questions(range(3, 500), 12, (4, 150), (4, 40), seed=3)


async def crowd(server: LiveServer, answers: list[Answer]) -> tuple[Clients, dict[str, int], list[Answer]]:
    async with open_session(120, None) as session:
        clients = Clients(session, server.url, QUESTIONS, answers, seed=3, patience_s=0.5)
        await clients.run(320, math.inf, 48)
        return clients, await soak.left_over(session, server.url), await idle_answers(session, server.url, QUESTIONS)


async def ask_all(url: str, questions: list[Question]) -> list[Answer]:
    async with open_session(120, None) as session:
        return await idle_answers(session, url, questions)


@pytest.mark.parametrize("dtype", ["bf16", "int4_per_token_head"])
def test_a_crowd_gets_the_answers_of_an_idle_server_and_leaves_no_pages_in_use(dtype: str) -> None:
    with live_server(kv_cache_dtype=dtype) as server:
        answers = asyncio.run(ask_all(server.url, QUESTIONS))
        server.front.capacity = 8  # of 48 clients
        clients, left, again = asyncio.run(crowd(server, answers))
        assert server.front.admitted == 0
    found = clients.findings
    assert found.count("wrong", "improper", "error") == 0, found.examples
    # The numbers of refused clients and of those that leave in time depend on the machine.
    assert min(found.count(outcome) for outcome in ("right", "told", "served")) > 0, found.outcomes
    assert sum(found.outcomes.values()) == 320
    assert not any(left.values()), left
    assert again == answers


def test_wrong_answers_are_found() -> None:
    async def visit(url: str) -> Clients:
        async with open_session(60, None) as session:
            wrong = [Answer("", ())] * len(QUESTIONS)
            clients = Clients(session, url, QUESTIONS, wrong, seed=1, polite=True)
            await clients.run(6, math.inf, 6)
            return clients

    with live_server() as server:
        assert asyncio.run(visit(server.url)).findings.outcomes == {"wrong": 6}


def test_figures_of_memory_and_health() -> None:
    seen = [(float(i), None if i == 7 else 0.001 * i, 100 + i) for i in range(50)]
    assert soak.memory_figures(seen) == {"fifths_bytes": [104, 114, 124, 134, 144], "growth": 144 / 114 - 1}
    health = soak.health_figures(seen)
    assert (health["asked"], health["failed"]) == (50, 1)
    assert health["max"] == pytest.approx(49)
