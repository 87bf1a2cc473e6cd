"""Live replicas on a real trace, prefix-aware or in turn, compared with what `kvanta plan --fleet` predicts.

    python benchmarks/random_gguf.py llama-15m Q8_0 small.gguf --layers 16
    benchmarks/fleet_costs.py small.gguf --threads 1 --formats int4 --short 128 --long 1024 --block-size 16 --json C
    python benchmarks/fleet_routing.py small.gguf TRACE --costs C --routing round-robin --json F

Before the load, prompts to the idle server measure the CPU time of prompts, requests and messages in clients, front,
replicas and engines, and the CPUs that all of these have together: engines have one thread each and share the machine.
The load runs --runs times; medians are compared. Each call adds its row to FILE or replaces its routing's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import aiohttp
from fleet_costs import prompt_costs
from fleet_work import Threads, Work
from server_process import KVANTA, free_port, server_process

from kvanta.fleet.costs import ReplicaCosts
from kvanta.fleet.report import costs_by_format
from kvanta.fleet.simulate import Fleet, simulate
from kvanta.loadgen.bench import Load, ServerOptions, bench_server
from kvanta.loadgen.client import open_session
from kvanta.loadgen.records import RequestRecord
from kvanta.loadgen.runner import run_load
from kvanta.loadgen.target import find_target
from kvanta.loadgen.traces import MOONCAKE_BLOCK, read_trace
from kvanta.loadgen.workload import PlannedRequest, Workload, synthetic

SHORT_TOKENS, MEDIUM_TOKENS, LONG_TOKENS = 8, 128, 1000
SINGLE, BURST = 30, 48
ANSWER = 17
SETTLE_S = 0.3
"""After which the work on a load's last request is done."""


async def measured_costs(threads: Threads, url: str, costs: ReplicaCosts) -> tuple[ReplicaCosts, float]:
    """The costs with those of prompts, requests and messages as the idle server has them, and the CPUs that the
    replicas have when all of them work.
    """
    runs = itertools.count(1)
    count = len(threads.replicas)
    async with open_session(60.0, None) as session:
        target = await find_target(session, url)
        maker = target.maker(1)

        async def run(requests: int, concurrency: int, tokens: int, answer: int) -> tuple[float, Work]:
            """Median time to the first token, and the work on a request."""
            number = next(runs)

            async def send(request: PlannedRequest, record: RequestRecord, clock: Any) -> None:
                await target.send(session, target.prompt(maker, request, number), record, clock)

            load = synthetic(
                requests=requests, rate=math.inf, burstiness=1.0, input_tokens=tokens, output_tokens=answer
            )
            before = threads.work()
            records, _ = await run_load(load, send, concurrency=concurrency)
            await asyncio.sleep(SETTLE_S)
            work = threads.work().minus(before).per(requests)
            return statistics.median(record.ttft_s for record in records), work

        async def cpus_when_busy() -> float:
            """CPUs that front, clients and replicas get together while every engine has work."""
            load = asyncio.create_task(run(8 * count, 8 * count, LONG_TOKENS, 1))
            await asyncio.sleep(1.0)
            before = threads.work()
            await asyncio.sleep(2.0)
            work = threads.work().minus(before)
            await load
            return (work.client + work.front + work.messages + work.engines) / work.wall

        ttft_s, single = await run(SINGLE, 1, SHORT_TOKENS, 1)
        _, medium = await run(12, 1, MEDIUM_TOKENS, 1)
        _, long = await run(6, 1, LONG_TOKENS, 1)
        _, together = await run(4 * count, count, LONG_TOKENS, 1)
        _, one = await run(BURST, 2 * count, SHORT_TOKENS, 1)
        _, more = await run(BURST, 2 * count, SHORT_TOKENS, ANSWER)
        cpus = statistics.median([await cpus_when_busy() for _ in range(3)])
    slowdown = max(1.0, together.engines / long.engines)
    token_s, depth_s = prompt_costs(
        MEDIUM_TOKENS, medium.engines - single.engines, LONG_TOKENS, long.engines - single.engines
    )
    message = more.minus(one).per((ANSWER - 1) * slowdown)
    request = one.per(slowdown).minus(message)
    own_s = single.client + single.front + single.messages + single.engines
    return dataclasses.replace(
        costs,
        prefill_token_s=token_s,
        prefill_depth_s=depth_s,
        client_request_s=max(0.0, request.client),
        client_message_s=max(0.0, message.client),
        front_s=max(0.0, request.front),
        front_message_s=max(0.0, message.front),
        replica_request_s=max(0.0, request.messages),
        message_s=max(0.0, message.messages),
        request_s=max(0.0, ttft_s - own_s),
    ), cpus


async def measure(
    pid: int, url: str, workload: Workload, costs: ReplicaCosts, runs: int
) -> tuple[ReplicaCosts, float, list[dict[str, Any]]]:
    """The costs and CPUs, by measured_costs, and the figures of each run of the load."""
    warm_up = synthetic(requests=30, rate=math.inf, burstiness=1.0, input_tokens=512, output_tokens=4)
    await bench_server(ServerOptions(url, prompts="ids"), lambda _: warm_up, [Load(None, None)])
    threads = Threads.of(pid)
    costs, cpus = await measured_costs(threads, url, costs)
    rows = []
    for _ in range(runs):
        async with aiohttp.ClientSession() as session, session.post(f"{url}/reset_prefix_cache") as response:
            response.raise_for_status()
        before = threads.work()
        report = await bench_server(ServerOptions(url, prompts="ids"), lambda _: workload, [Load(None, None)])
        [run] = report["runs"]
        if run["failed"]:
            raise SystemExit(f"error: {run['errors']}")
        rows.append(live_row(run))
        print(json.dumps({**rows[-1], "work": vars(threads.work().minus(before))}), file=sys.stderr, flush=True)
    return costs, cpus, rows


def live_row(run: dict[str, Any]) -> dict[str, Any]:
    """Figures of a run, under the simulator's names."""
    times = run["ttft_ms"]
    return {
        "hit_rate": run["cached_tokens"] / run["input_tokens"],
        **{f"ttft_{name}_s": times[name] / 1000 for name in ("mean", "p50", "p99")},
        "output_tokens_per_s": run["output_throughput"],
        "generator_lag_p99_s": run["generator_lag_ms"]["p99"] / 1000,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("trace")
    parser.add_argument("--costs", required=True, help="benchmarks/fleet_costs.py's, of one thread")
    parser.add_argument("--routing", choices=("round-robin", "prefix-aware"), required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400, help="the first ones of the trace")
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--max-input-len", type=int, default=1024)
    parser.add_argument("--time-scale", type=float, default=0.35)
    parser.add_argument("--cache-tokens", type=int, default=32768, help="that a replica's cache holds")
    parser.add_argument("--format", default="int4")
    parser.add_argument("--runs", type=int, default=3, help="of the load, whose medians are compared [3]")
    parser.add_argument("--json", type=Path, required=True)
    values = parser.parse_args()
    workload = read_trace(
        values.trace,
        requests=values.requests,
        length_scale=values.length_scale,
        max_input=values.max_input_len,
    ).stretched(values.time_scale)
    page = round(MOONCAKE_BLOCK * values.length_scale)
    longest = max(request.input_tokens + request.output_tokens for request in workload.requests)
    port = free_port()
    command = [
        *(*KVANTA, values.model, "--port", str(port), "--no-log-requests", "--threads", "1", "--block-size", str(page)),
        *("--kv-cache-dtype", values.format, "--num-gpu-blocks-override", str(values.cache_tokens // page)),
        *("--max-model-len", str(longest), "--replicas", str(values.replicas), "--replica-routing", values.routing),
    ]
    costs: ReplicaCosts = costs_by_format(values.costs, [values.format])[values.format]
    with server_process(command, port) as server:
        costs, cpus, runs = asyncio.run(measure(server.pid, server.url, workload, costs, values.runs))
    fleet = Fleet(values.replicas, values.routing, values.cache_tokens, 1.0, costs, cpus=cpus)
    live = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    simulated = simulate(workload, fleet)
    row = {
        "routing": values.routing,
        "live": live,
        "simulated": {name: simulated.get(name) for name in live},
        "difference": {name: simulated[name] / live[name] - 1 for name in live if name in simulated},
        "runs": runs,
        "costs": vars(costs),
        "cpus": cpus,
    }
    print(json.dumps(row, indent=1))
    setting = {
        "trace": workload.source,
        "requests": len(workload.requests),
        "mean_rate": workload.mean_rate,
        "replicas": values.replicas,
        "cache_tokens": values.cache_tokens,
        "format": values.format,
    }
    rows = json.loads(values.json.read_text())["rows"] if values.json.exists() else []
    rows = [*(each for each in rows if each["routing"] != values.routing), row]
    values.json.write_text(
        json.dumps({**setting, "rows": sorted(rows, key=lambda each: each["routing"])}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
