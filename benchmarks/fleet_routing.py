"""Live replicas on a real trace, prefix-aware or in turn, beside what `kvanta plan --fleet` says of the same replicas.

    python benchmarks/random_gguf.py llama-15m Q8_0 small.gguf --layers 16
    benchmarks/fleet_costs.py small.gguf --threads 1 --formats int4 --short 128 --long 1024 --block-size 16 --json C
    python benchmarks/fleet_routing.py small.gguf TRACE --costs C --routing round-robin --json F

Before the load, prompts of three lengths to the idle server, one by one, one for each replica and in bursts, measure
what prompts, requests and messages cost, and the CPUs that the replicas have when all of them work: they have
one thread each and share the machine. Each run adds its row to FILE or replaces its routing's.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import aiohttp
from fleet_costs import prompt_costs
from server_process import KVANTA, free_port, replicas, server_process

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


async def idle_costs(url: str, costs: ReplicaCosts, count: int) -> tuple[ReplicaCosts, float]:
    """The costs with those of prompts, requests and messages as the live server has them, and the CPUs that `count`
    replicas seem to have when all of them work.
    """
    runs = itertools.count(1)
    async with open_session(60.0, None) as session:
        target = await find_target(session, url)
        maker = target.maker(1)

        async def run(requests: int, concurrency: int, tokens: int, answer: int) -> tuple[float, float]:
            """Median time to the first token, and seconds of all."""
            number = next(runs)

            async def send(request: PlannedRequest, record: RequestRecord, clock: Any) -> None:
                await target.send(session, target.prompt(maker, request, number), record, clock)

            load = synthetic(
                requests=requests, rate=math.inf, burstiness=1.0, input_tokens=tokens, output_tokens=answer
            )
            records, seconds = await run_load(load, send, concurrency=concurrency)
            return statistics.median(record.ttft_s for record in records), seconds

        single, _ = await run(SINGLE, 1, SHORT_TOKENS, 1)
        medium, _ = await run(8, 1, MEDIUM_TOKENS, 1)
        long, _ = await run(4, 1, LONG_TOKENS, 1)
        together = statistics.median([(await run(count, count, LONG_TOKENS, 1))[1] for _ in range(3)])
        one = statistics.median([(await run(BURST, BURST, SHORT_TOKENS, 1))[1] for _ in range(3)])
        more = statistics.median([(await run(BURST, BURST, SHORT_TOKENS, ANSWER))[1] for _ in range(3)])
    token_s, depth_s = prompt_costs(MEDIUM_TOKENS, medium - single, LONG_TOKENS, long - single)
    cpus = min(float(count), count * long / together)
    # In bursts, all CPUs are busy with requests and messages, and with the engines' steps.
    prompt_s = max(SHORT_TOKENS * token_s, costs.step_s)
    front_s = max(0.0, one / BURST - prompt_s / cpus)
    steps = (ANSWER - 1) * (count * costs.step_s + (BURST - count) * costs.decode_sequence_s)
    return dataclasses.replace(
        costs,
        prefill_token_s=token_s,
        prefill_depth_s=depth_s,
        front_s=front_s,
        request_s=max(0.0, single - front_s - prompt_s),
        message_s=max(0.0, ((more - one) * cpus - steps) / (BURST * (ANSWER - 1))),
    ), cpus


def prefer_messages(pid: int) -> None:
    """Lowers the priority of the engines' threads, so that front and load generator, which would have machines of their
    own, do not wait for them.
    """
    for replica in replicas(pid):
        used = {}
        for task in Path(f"/proc/{replica}/task").iterdir():
            fields = (task / "stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
            used[int(task.name)] = int(fields[11])
        os.setpriority(os.PRIO_PROCESS, max(used, key=lambda thread: used[thread]), 10)


async def measure(
    pid: int, url: str, workload: Workload, costs: ReplicaCosts, count: int
) -> tuple[ReplicaCosts, float, dict[str, Any]]:
    """The costs and CPUs, by idle_costs, and the load's figures."""
    warm_up = synthetic(requests=30, rate=math.inf, burstiness=1.0, input_tokens=512, output_tokens=4)
    await bench_server(ServerOptions(url, prompts="ids"), lambda _: warm_up, [Load(None, None)])
    prefer_messages(pid)
    costs, cpus = await idle_costs(url, costs, count)
    async with aiohttp.ClientSession() as session, session.post(f"{url}/reset_prefix_cache") as response:
        response.raise_for_status()
    report = await bench_server(ServerOptions(url, prompts="ids"), lambda _: workload, [Load(None, None)])
    [run] = report["runs"]
    if run["failed"]:
        raise SystemExit(f"error: {run['errors']}")
    return costs, cpus, run


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
        costs, cpus, run = asyncio.run(measure(server.pid, server.url, workload, costs, values.replicas))
    fleet = Fleet(values.replicas, values.routing, values.cache_tokens, 1.0, costs, cpus=cpus)
    live, simulated = live_row(run), simulate(workload, fleet)
    row = {
        "routing": values.routing,
        "live": live,
        "simulated": {name: simulated.get(name) for name in live},
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
