"""The measurement of `kvanta bench engine`: a workload against an engine of this process, without HTTP or text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvanta import _core
from kvanta.engine.ranks import engine_with_ranks
from kvanta.errors import InputError, KvantaError, QueueFullError
from kvanta.loadgen.goodput import Goodput
from kvanta.loadgen.prompts import PromptMaker
from kvanta.loadgen.records import LoadError, RequestRecord
from kvanta.loadgen.runner import Clock, run_load
from kvanta.loadgen.summary import summarize
from kvanta.loadgen.workload import PlannedRequest, Workload

_MAX_OUTPUTS = 256  # taken at once
# Time of a run by the engine's counters: parts of a step, except the last, which follows the step.
_PARTS = ("seconds_schedule", "seconds_masks", "seconds_sample", "seconds_callback")


@dataclass(frozen=True)
class EngineLoad:
    """One run: requests per second (None: all at once) and the most on their way (None: any number)."""

    workload: Workload
    rate: float | None
    concurrency: int | None


def bench_engine(
    config: _core.EngineConfig,
    loads: Sequence[EngineLoad],
    *,
    seed: int = 0,
    goodput: Goodput | None = None,
    finished: Callable[[], object] = lambda: None,
) -> tuple[_core.Engine, list[dict[str, Any]]]:
    """The engine, stopped, and a run for each load: the keys of docs/bench-serve.md, and those of _engine_figures."""
    engine, _ranks = engine_with_ranks(config)  # the other ranks, if any, end with this call
    for load in loads:
        for request in load.workload.requests:
            if request.input_tokens + request.output_tokens > engine.config.max_model_len:
                raise InputError(
                    f"request {request.index} has {request.input_tokens} + {request.output_tokens} tokens, "
                    f"max_model_len is {engine.config.max_model_len}"
                )
    desk = _Desk(engine, seed)
    descriptor = engine.start_with_queue()
    try:
        runs = [
            asyncio.run(_run(engine, desk, descriptor, number, load, goodput, finished))
            for number, load in enumerate(loads)
        ]
    finally:
        engine.stop()
    return engine, runs


async def _run(
    engine: _core.Engine,
    desk: _Desk,
    descriptor: int,
    number: int,
    load: EngineLoad,
    goodput: Goodput | None,
    finished: Callable[[], object],
) -> dict[str, Any]:
    before = engine.stats()
    desk.begin(number)
    asyncio.get_running_loop().add_reader(descriptor, desk.collect)
    records, seconds = await run_load(load.workload, desk.send, concurrency=load.concurrency, finished=finished)
    after = engine.stats()
    return {
        "rate": load.rate,
        "concurrency": load.concurrency,
        **summarize(records, seconds, goodput),
        "engine": {**_engine_figures(before, after), **_full_steps(engine, after["steps"] - before["steps"])},
    }


@dataclass
class _Pending:
    record: RequestRecord
    clock: Clock
    done: asyncio.Event
    error: str = ""


class _Desk:
    """Submits requests and collects outputs, as the server does."""

    def __init__(self, engine: _core.Engine, seed: int) -> None:
        self._engine = engine
        special = {*engine.info.eos_token_ids, 0}
        self._maker = PromptMaker([token for token in range(engine.info.vocab) if token not in special], seed)
        self._number = 0
        self._pending: dict[str, _Pending] = {}

    def begin(self, number: int) -> None:
        """A run; its prompts share nothing with those of others."""
        self._number = number

    async def send(self, request: PlannedRequest, record: RequestRecord, clock: Clock) -> None:
        """One request, to its end. Raises LoadError."""
        sampling = _core.SamplingParams()
        sampling.max_tokens = request.output_tokens
        sampling.temperature = 0.0
        sampling.ignore_eos = True
        name = f"{self._number}-{request.index}"
        pending = _Pending(record, clock, asyncio.Event())
        self._pending[name] = pending
        try:
            self._engine.add(name, self._maker.pieces(request, self._number), sampling)
            await pending.done.wait()
        except QueueFullError as error:
            raise LoadError("queue_full", str(error)) from None
        except KvantaError as error:
            raise LoadError("refused", str(error)) from None
        finally:
            del self._pending[name]
        if pending.error:
            raise LoadError("engine_error", pending.error)

    def collect(self) -> None:
        """Called on the event loop when outputs are ready."""
        now: float | None = None
        for entry in self._engine.pop_outputs(_MAX_OUTPUTS):
            pending = self._pending.get(entry.id)
            if pending is None:
                continue
            record = pending.record
            if entry.tokens:
                if now is None:
                    now = pending.clock()
                record.news_s.append(now)
                record.output_tokens += len(entry.tokens)
            if entry.finish != _core.FinishReason.NONE:
                record.cached_tokens = entry.cached_tokens
                pending.error = entry.error
                pending.done.set()


def _full_steps(engine: _core.Engine, steps: int) -> dict[str, Any]:
    """Time of full steps outside the model, among the last steps; full: as many requests got a token as in any step."""
    recent = engine.recent_steps()[-steps:] if steps else []
    most = max((sequences for sequences, _ in recent), default=0)
    costs = [1e3 * seconds for sequences, seconds in recent if sequences == most]
    outside = dict(zip(("p50", "p99"), map(float, np.percentile(costs, (50, 99))), strict=True)) if costs else None
    return {"most_tokens_per_step": most, "full_steps": len(costs), "full_step_outside_model_ms": outside}


def _engine_figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Cost of a run: milliseconds per step in the model, and outside it by part."""

    def gained(name: str) -> Any:
        return after[name] - before[name]

    steps = max(1, gained("steps"))
    model, total = gained("seconds_forward"), gained("seconds_total") + gained("seconds_callback")
    parts = {f"{name.removeprefix('seconds_')}_ms": 1e3 * gained(name) / steps for name in _PARTS}
    earlier = {row["name"]: row for row in before["profile"]}
    profile = []
    for row in after["profile"]:
        old = earlier.get(row["name"], {"seconds": 0.0, "calls": 0})
        seconds, calls = row["seconds"] - old["seconds"], row["calls"] - old["calls"]
        profile.append({"name": row["name"], "ms_per_step": 1e3 * seconds / steps, "calls": calls})
    return {
        "steps": gained("steps"),
        "step_ms": 1e3 * total / steps,
        "model_ms": 1e3 * model / steps,
        "outside_model_ms": 1e3 * (total - model) / steps,
        **parts,
        "preemptions": gained("preemptions"),
        "prefix_queried_tokens": gained("prefix_queries"),
        "prefix_hit_tokens": gained("cached_tokens"),
        "profile": sorted(profile, key=lambda row: -row["ms_per_step"]),
    }
