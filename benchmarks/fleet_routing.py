"""Live replicas on a real trace, prefix-aware or in turn, beside what `kvanta plan --fleet` says of the same replicas.

    python benchmarks/random_gguf.py llama-15m Q8_0 small.gguf --layers 16
    python benchmarks/fleet_costs.py small.gguf --formats int4 --short 128 --long 1024 --threads 1 --json costs.json
    python benchmarks/fleet_routing.py small.gguf conversation_trace.jsonl --costs costs.json --routing round-robin \\
        --json docs/results/fleet-routing.json

Before the load, single short prompts to the idle server and a burst of them measure what a request costs beside its
replica: request_s and front_s. Replicas have one thread each and share the machine's CPUs, in the simulation as well.
Each run adds its rows to FILE or replaces its routing's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import aiohttp
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

SHORT_TOKENS = 8
SINGLE, BURST = 40, 60


async def idle_times(url: str, step_s: float) -> dict[str, float]:
    """front_s and request_s of ReplicaCosts."""
    async with open_session(60.0, None) as session:
        target = await find_target(session, url)
        maker = target.maker(1)

        async def send(request: PlannedRequest, record: RequestRecord, clock: Any) -> None:
            await target.send(session, target.prompt(maker, request, request.index), record, clock)

        async def run(count: int, concurrency: int) -> tuple[list[RequestRecord], float]:
            short = synthetic(
                requests=count, rate=float("inf"), burstiness=1.0, input_tokens=SHORT_TOKENS, output_tokens=1
            )
            return await run_load(short, send, concurrency=concurrency)

        await run(10, 1)
        records, _ = await run(SINGLE, 1)
        single = statistics.median(record.ttft_s for record in records)
        _, seconds = await run(BURST, BURST)
    front_s = seconds / BURST
    return {"front_s": front_s, "request_s": max(0.0, single - front_s - step_s)}


async def measure(url: str, workload: Workload, step_s: float) -> tuple[dict[str, float], dict[str, Any]]:
    """The costs beside the replicas, and the load's figures."""
    beside = await idle_times(url, step_s)
    async with aiohttp.ClientSession() as session, session.post(f"{url}/reset_prefix_cache") as response:
        response.raise_for_status()
    report = await bench_server(ServerOptions(url, prompts="ids"), lambda _: workload, [Load(None, None)])
    [run] = report["runs"]
    if run["failed"]:
        raise SystemExit(f"error: {run['errors']}")
    return beside, run


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
    parser.add_argument("--requests", type=int, default=800, help="the first ones of the trace")
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--max-input-len", type=int, default=1024)
    parser.add_argument("--time-scale", type=float, default=0.17)
    parser.add_argument("--cache-tokens", type=int, default=32768, help="that a replica's cache holds")
    parser.add_argument("--format", default="int4")
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
        beside, run = asyncio.run(measure(server.url, workload, costs.step_s))
    costs = dataclasses.replace(costs, **beside)
    cpus = len(os.sched_getaffinity(0))
    fleet = Fleet(values.replicas, values.routing, values.cache_tokens, 1.0, costs, cpus=cpus)
    live, simulated = live_row(run), simulate(workload, fleet)
    row = {"routing": values.routing, **beside, "live": live, "simulated": {name: simulated.get(name) for name in live}}
    print(json.dumps(row, indent=1))
    setting = {
        "trace": workload.source,
        "requests": len(workload.requests),
        "mean_rate": workload.mean_rate,
        "replicas": values.replicas,
        "cpus": cpus,
        "cache_tokens": values.cache_tokens,
        "format": values.format,
        "costs": vars(costs_by_format(values.costs, [values.format])[values.format]),
    }
    rows = json.loads(values.json.read_text())["rows"] if values.json.exists() else []
    rows = [*(each for each in rows if each["routing"] != values.routing), row]
    values.json.write_text(json.dumps({**setting, "rows": sorted(rows, key=lambda each: each["routing"])}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
