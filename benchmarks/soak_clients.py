"""Clients of an overloaded server: most wait for an answer, some disconnect or attack it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from soak_attacks import COMPLETIONS, COSTLY, MALFORMED, Attack

from kvanta.loadgen.records import RequestRecord
from kvanta.loadgen.runner import Clock, run_load
from kvanta.loadgen.sse import EventReader
from kvanta.loadgen.workload import PlannedRequest, Workload, arrival_times

LEAVE, HARM, COST, STREAM, SALTED = 0.25, 0.1, 0.05, 0.5, 0.5
"""Shares of visits: those that disconnect, send MALFORMED, send COSTLY; the last two are of the others."""


@dataclass(frozen=True)
class Question:
    """A prompt of token ids, and the number of new tokens."""

    prompt: tuple[int, ...]
    tokens: int

    def body(self, **more: Any) -> dict[str, Any]:
        """Body of the request."""
        fixed = {"prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}
        return {**fixed, "return_token_ids": True, **more}


@dataclass(frozen=True)
class Answer:
    """A text and its tokens."""

    text: str
    tokens: tuple[int, ...]


def make_questions(
    ids: Sequence[int], count: int, prompt: tuple[int, int], tokens: tuple[int, int], seed: int
) -> list[Question]:
    """Random questions. prompt, tokens: minimum and maximum lengths."""
    chance = random.Random(seed)
    return [
        Question(tuple(chance.choices(ids, k=chance.randint(*prompt))), chance.randint(*tokens)) for _ in range(count)
    ]


OUTCOMES = ("right", "refused", "told", "served", "left", "error", "wrong", "improper")
"""told: a malformed one's 400. served: a costly one's answer. error: a proper one.

Never: wrong (another answer than an idle server's), improper (no answer, or none of OpenAI's form).
"""


@dataclass
class Findings:
    """Outcomes of the visits."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of visits by name in OUTCOMES."""
    examples: list[str] = field(default_factory=list)
    """Examples of errors and of what must not be."""

    def add(self, outcome: str, example: str = "") -> None:
        """Counts one visit."""
        self.outcomes[outcome] += 1
        if example and len(self.examples) < 10:
            self.examples.append(f"{outcome}: {example[:300]}")

    def count(self, *outcomes: str) -> int:
        """Total of these outcomes."""
        return sum(self.outcomes[outcome] for outcome in outcomes)


class Clients:
    """Visits to one server. answers: those of the idle server, by question; without them, answers are not compared.

    patience_s: clients that disconnect do so within this time.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        questions: Sequence[Question],
        answers: Sequence[Answer] = (),
        *,
        seed: int = 0,
        patience_s: float = 10.0,
        polite: bool = False,
    ) -> None:
        self._session = session
        self._url = url
        self._questions = questions
        self._answers = answers
        self._seed = seed
        self._patience_s = patience_s
        self._polite = polite
        self.findings = Findings()

    async def run(self, visits: int, rate: float, clients: int) -> tuple[list[RequestRecord], float]:
        """Runs `visits` at `rate` per second (infinite: when one of the `clients` is free): records, seconds."""
        times = arrival_times(visits, rate, 1.0, np.random.default_rng([self._seed, 1]))
        planned = tuple(PlannedRequest(index, time, 0, 0) for index, time in enumerate(times))
        return await run_load(Workload(planned, {}), self._visit, concurrency=clients)

    async def _visit(self, planned: PlannedRequest, record: RequestRecord, clock: Clock) -> None:
        chance = random.Random(f"{self._seed} {planned.index}")
        number = chance.randrange(len(self._questions))
        question = self._questions[number]
        fate = 1.0 if self._polite else chance.random()
        more: dict[str, Any] = {"stream": chance.random() < STREAM}
        if chance.random() < SALTED:  # computed without the prefix cache
            more["cache_salt"] = f"{planned.index}"
        try:
            if fate < LEAVE:
                async with asyncio.timeout(chance.random() * self._patience_s):
                    await self._ask(number, question.body(**more), record, clock)
            elif fate < LEAVE + HARM + COST:
                await self._attack(chance.choice(MALFORMED if fate < LEAVE + HARM else COSTLY))
            else:
                await self._ask(number, question.body(**more), record, clock)
        except TimeoutError:
            self.findings.add("left" if fate < LEAVE else "improper", "" if fate < LEAVE else "no answer in time")
        except (aiohttp.ClientError, ValueError, KeyError, IndexError, TypeError) as error:
            self.findings.add("improper", repr(error))

    async def _ask(self, number: int, body: dict[str, Any], record: RequestRecord, clock: Clock) -> None:
        async with self._session.post(self._url + COMPLETIONS, json=body) as response:
            if response.status != 200:
                await self._refused(response)
            elif response.content_type == "text/event-stream":
                self._compare(number, await _read_stream(response, record, clock))
            else:
                self._compare(number, answer_of((await response.json())["choices"]))

    async def _attack(self, attack: Attack) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url + attack.path, data=attack.body, headers=headers) as response:
            if response.status != 200:
                await self._refused(response, attack)
                return
            async for _ in response.content.iter_any():
                pass
            expected = attack.status == 200
            self.findings.add("served" if expected else "improper", "" if expected else f"an answer to {attack!r}")

    async def _refused(self, response: aiohttp.ClientResponse, attack: Attack | None = None) -> None:
        said = f"{response.status} {(await response.json())['error']['message']}"
        if response.status == 429 and int(response.headers["Retry-After"]) > 0:
            self.findings.add("refused")
        elif attack is not None and response.status == attack.status:
            self.findings.add("told")
        else:
            proper = response.status in (503, 504)
            self.findings.add("error" if proper else "improper", said if attack is None else f"{said}: {attack!r}")

    def _compare(self, number: int, answer: Answer | str) -> None:
        if isinstance(answer, str):
            self.findings.add("error", answer)
        elif self._answers and answer != self._answers[number]:
            self.findings.add("wrong", f"question {number}: {answer} instead of {self._answers[number]}")
        else:
            self.findings.add("right")


def answer_of(choices: Sequence[dict[str, Any]]) -> Answer:
    """Answer from its choices, or from all its chunks; raises ValueError if they do not end."""
    if not choices or choices[-1]["finish_reason"] != "length":
        raise ValueError(f"the answer does not end: {choices[-1:]}")
    tokens = tuple(token for each in choices for token in each["token_ids"])
    return Answer("".join(each["text"] for each in choices), tokens)


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord, clock: Clock) -> Answer | str:
    """The answer, or the message of an error in the stream."""
    reader = EventReader()
    data: list[str] = []
    async for received in response.content.iter_any():
        events = reader.feed(received)
        if events:
            record.news_s.append(clock())
        data += events
    if not data or data[-1] != "[DONE]":
        raise ValueError(f"the stream does not end with [DONE]: {data[-1:]}")
    chunks = [json.loads(text) for text in data[:-1]]
    for chunk in chunks:
        if "error" in chunk:
            return str(chunk["error"]["message"])
    return answer_of([choice for chunk in chunks for choice in chunk["choices"]])


async def idle_answers(session: aiohttp.ClientSession, url: str, questions: Sequence[Question]) -> list[Answer]:
    """Answers of the idle server, one by one, each computed without the prefix cache."""
    answers = []
    for number, question in enumerate(questions):
        async with session.post(url + COMPLETIONS, json=question.body(cache_salt=f"idle {number}")) as response:
            response.raise_for_status()
            answers.append(answer_of((await response.json())["choices"]))
    return answers
