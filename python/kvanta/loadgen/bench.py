"""The measurement of `kvanta bench serve`: a workload against one server, at one load after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from kvanta.errors import InputError, ResourceError
from kvanta.loadgen.client import open_session
from kvanta.loadgen.goodput import TOKENS_ALONE, AloneLatencies, Goodput, lengths_alone
from kvanta.loadgen.goodput import Target as LatencyTarget
from kvanta.loadgen.prompts import PromptMaker
from kvanta.loadgen.records import LoadError, RequestRecord
from kvanta.loadgen.runner import Clock, run_load
from kvanta.loadgen.server_metrics import read_metrics
from kvanta.loadgen.summary import summarize
from kvanta.loadgen.target import Target, find_target
from kvanta.loadgen.workload import PlannedRequest, Workload


@dataclass(frozen=True)
class Load:
    """One run: requests per second (infinite: all at once; None: as the workload has it) and the most on their way."""

    rate: float | None
    concurrency: int | None


@dataclass(frozen=True)
class ServerOptions:
    """Parameters of requests to a server; see find_target."""

    url: str
    model: str | None = None
    api: str = "completions"
    prompts: str = "auto"
    api_key: str | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    ids: tuple[int, ...] = ()


async def bench_server(
    options: ServerOptions,
    workload_at: Callable[[Load], Workload],
    loads: Sequence[Load],
    *,
    seed: int = 0,
    targets: Mapping[str, LatencyTarget] | None = None,
    label: str | None = None,
    finished: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The report (docs/bench-serve.md). Raises InputError, or ResourceError if the server does not answer at all."""
    async with open_session(options.timeout_s, options.api_key) as session:
        target = await find_target(
            session,
            options.url,
            model=options.model,
            api=options.api,
            prompts=options.prompts,
            extra=options.extra,
            ids=options.ids,
        )
        maker = target.maker(seed)
        workloads = [workload_at(load) for load in loads]
        for workload in workloads:
            _check_lengths(workload, target)
        alone: list[AloneLatencies] = []
        if any(each.is_multiple for each in (targets or {}).values()):
            alone = await _measure_alone(session, target, maker, workloads)
        goodput = Goodput(targets, alone) if targets else None
        runs = []
        metrics = await read_metrics(session, target.base)
        for number, (load, workload) in enumerate(zip(loads, workloads, strict=True)):

            async def send(request: PlannedRequest, record: RequestRecord, clock: Clock, run: int = number) -> None:
                await target.send(session, target.prompt(maker, request, run), record, clock)

            records, seconds = await run_load(workload, send, concurrency=load.concurrency, finished=finished)
            earlier, metrics = metrics, await read_metrics(session, target.base)
            runs.append(
                {
                    "rate": _finite(load.rate if load.rate is not None else workload.mean_rate),
                    "concurrency": load.concurrency,
                    **summarize(records, seconds, goodput),
                    "server": metrics.since(earlier),
                }
            )
    cache_dtype = target.cache_dtype or metrics.cache_dtype
    return {
        "url": target.base,
        "model": target.model,
        "label": label or cache_dtype or target.model,
        "engine": metrics.engine,
        "cache_dtype": cache_dtype,
        "max_model_len": target.max_model_len,
        "api": target.api,
        "prompts": target.prompt_kind,
        "exact_lengths": target.exact,
        "workload": workloads[0].source,
        "alone": [asdict(each) for each in alone] or None,
        "runs": runs,
    }


async def _measure_alone(
    session: aiohttp.ClientSession, target: Target, maker: PromptMaker, workloads: Sequence[Workload]
) -> list[AloneLatencies]:
    """Latencies of one request at a time, on the server that is idle before the runs, with separate prompts."""
    requests = [request for workload in workloads for request in workload.requests]
    tokens = min(TOKENS_ALONE, max(request.output_tokens for request in requests))
    lengths = lengths_alone([request.input_tokens for request in requests])
    planned = [PlannedRequest(index, 0.0, length, tokens) for index, length in enumerate(lengths)]

    async def send(request: PlannedRequest, record: RequestRecord, clock: Clock) -> None:
        await target.send(session, target.prompt(maker, request, len(workloads)), record, clock)

    records, _ = await run_load(Workload(tuple(planned), {}), send, concurrency=1)
    for record in records:
        if not record.succeeded:
            error = record.error or LoadError("bad_response", "the answer has no token")
            raise ResourceError(f"a request alone, of {record.input_tokens} tokens: {error.kind}: {error.detail}")
    return sorted(map(AloneLatencies.of, records), key=lambda each: each.input_tokens)


def _finite(rate: float) -> float | None:
    return rate if rate < float("inf") else None


def _check_lengths(workload: Workload, target: Target) -> None:
    most = target.max_model_len
    if most is None:
        return
    for request in workload.requests:
        if request.input_tokens + request.output_tokens > most:
            raise InputError(
                f"request {request.index} has {request.input_tokens} + {request.output_tokens} tokens, the server's "
                f"max_model_len is {most}; make requests shorter, or those of a trace with --length-scale, "
                "--max-input-len and --max-output-len"
            )
