"""A day of a Mooncake trace through a server whose prefix cache on disk holds a small part of it.

    python benchmarks/disk_trace.py stories260k conversation_trace.jsonl --json docs/results/disk-trace.json

The trace has an hour. It is repeated --hours times, compressed to --minutes; each hour keeps one of --share sessions,
and has different contents, but for the block that all prompts begin with. Lengths are multiplied by --length-scale and
cut to fit the model. At the end

* every request has been answered, and the disk has counted no error and no damaged file,
* the files of --kv-cache-dir never took more than --kv-cache-dir-bytes, by their blocks, looked at once a second,
* the server's memory has stopped growing between the second and the last fifth of the time,
* prompts of the last hour get the tokens that they get when nothing cached is read.

Exits with status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from server_process import KVANTA, ServerProcess, server_process, write_report
from soak import MOST_GROWTH, memory_figures

from kvanta.loadgen.client import fetch_json, fetch_text, open_session
from kvanta.loadgen.records import RequestRecord
from kvanta.loadgen.runner import Clock, run_load
from kvanta.loadgen.summary import summarize
from kvanta.loadgen.target import Target, find_target
from kvanta.loadgen.traces import read_trace
from kvanta.loadgen.workload import PlannedRequest, Workload
from kvanta.options.option import parse_bytes

_HOUR_S = 3600.0
_BLOCK_BYTES = 512  # of st_blocks
_SAMPLE_SECONDS, _LEAST_SAMPLES = 1.0, 40
_DISK_COUNTERS = ("queries", "hits", "read_bytes", "written_bytes", "evictions", "dropped")
_DISK_FAULTS = ("read_errors", "write_errors", "damaged_files")


def repeated_hour(trace: Workload, hours: int, share: int, minutes: float) -> Workload:
    """`hours` hours of the trace, compressed to `minutes`; hour h has the sessions whose number is h modulo `share`.

    Turns of a session have their second block in common, and all prompts their first.
    """
    stride = 1 + max(block for each in trace.requests for block in each.blocks)
    common = trace.requests[0].blocks[0]
    compressed = minutes * 60 / (hours * _HOUR_S)
    planned: list[PlannedRequest] = []
    for hour in range(hours):
        for each in trace.requests:
            if each.blocks[min(1, len(each.blocks) - 1)] % share != hour % share:
                continue
            blocks = tuple(block if block == common else block + hour * stride for block in each.blocks)
            arrival_s = (hour * _HOUR_S + each.arrival_s) * compressed
            planned.append(replace(each, index=len(planned), arrival_s=arrival_s, blocks=blocks))
    return Workload(tuple(planned), {**trace.source, "hours": hours, "share": share})


def allocated_bytes(folder: Path) -> tuple[int, int]:
    """Bytes on disk of all regular files below `folder`, and their number. Files may go meanwhile."""
    total = count = 0
    for each in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = each.lstat()
            if each.is_file():
                total, count = total + status.st_blocks * _BLOCK_BYTES, count + 1
    return total, count


async def watch(server: ServerProcess, folder: Path, pause_s: float, seen: list[tuple[float, int, int, int]]) -> None:
    """Samples until cancelled: time, bytes and number of files, resident bytes of the server."""
    begin = time.perf_counter()
    while True:
        files, count = await asyncio.to_thread(allocated_bytes, folder)
        seen.append((time.perf_counter() - begin, files, count, server.resident_bytes()))
        await asyncio.sleep(pause_s)


async def disk_counters(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """Counters of the disk in the /metrics of the server."""
    text = await fetch_text(session, "GET", f"{url}/metrics")
    values = dict(re.findall(r"^kvanta:disk_cache_(\w+?)(?:_total)?\{.*\} (\S+)$", text, re.MULTILINE))
    return {name: int(float(values[name])) for name in (*_DISK_COUNTERS, *_DISK_FAULTS)}


async def answer(session: aiohttp.ClientSession, target: Target, prompt: Any, **fields: Any) -> tuple[Any, int]:
    """Text of an answer of 16 tokens with their log-probabilities, and the prompt tokens that were cached."""
    body = {**target.body(prompt, 16), "stream": False, "logprobs": 1, **fields}
    del body["stream_options"]
    got = await fetch_json(session, "POST", f"{target.base}/v1/completions", body)
    details = got["usage"].get("prompt_tokens_details") or {}
    return got["choices"], int(details.get("cached_tokens") or 0)


async def replay(
    server: ServerProcess, workload: Workload, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Runs the day; returns the report."""
    seen: list[tuple[float, int, int, int]] = []
    async with open_session(options.timeout, None) as session:
        target = await find_target(session, server.url)
        maker = target.maker(options.seed)

        async def send(request: PlannedRequest, record: RequestRecord, clock: Clock) -> None:
            await target.send(session, target.prompt(maker, request, 0), record, clock)

        pause_s = min(_SAMPLE_SECONDS, 60 * options.minutes / _LEAST_SAMPLES)
        watcher = asyncio.create_task(watch(server, folder, pause_s, seen))
        records, seconds = await run_load(workload, send, concurrency=options.concurrency)
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        disk = await disk_counters(session, server.url)
        different = cached_tokens = 0
        last_hour = workload.requests[-(len(workload.requests) // options.hours) :]
        for request in last_hour[:: max(1, len(last_hour) // options.compared)][: options.compared]:
            prompt = target.prompt(maker, request, 0)
            warm, cached = await answer(session, target, prompt)
            cold, none = await answer(session, target, prompt, skip_reading_prefix_cache=True)
            different += warm != cold or none > 0
            cached_tokens += cached
    summary = summarize(records, seconds)
    memory = memory_figures([(at, None, resident) for at, _, _, resident in seen])
    limit = parse_bytes(options.kv_cache_dir_bytes)
    row = {
        "requests": summary["requests"],
        "failed": summary["failed"],
        "minutes": seconds / 60,
        "input_tokens": summary["input_tokens"],
        "cached_share": summary["cached_tokens"] / max(1, summary["input_tokens"]),
        "disk_share": disk["hits"] / max(1, summary["input_tokens"]),
        "written_mib": disk["written_bytes"] / 2**20,
        "limit_mib": limit / 2**20,
        "most_mib": max(files for _, files, _, _ in seen) / 2**20,
        "most_files": max(count for _, _, count, _ in seen),
        "evictions": disk["evictions"],
        "errors": sum(disk[name] for name in _DISK_FAULTS),
        "memory_growth": memory["growth"],
        "ttft_p99_ms": summary["ttft_ms"]["p99"],
    }
    return {
        "command": shlex.join(["benchmarks/disk_trace.py", *sys.argv[1:]]),
        "model": options.model,
        "trace": workload.source,
        "rows": [row],
        "errors": summary["errors"],
        "disk": disk,
        "memory": memory,
        "compared": {"prompts": options.compared, "cached_tokens": cached_tokens, "different": different},
        "verdicts": {
            "every request answered": summary["failed"] == 0,
            "no error of the disk": row["errors"] == 0,
            "files within their limit": row["most_mib"] <= row["limit_mib"],
            "memory flat": memory["growth"] < MOST_GROWTH,
            "the bits of prompts computed anew": different == 0 and cached_tokens > 0,
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--share", type=int, default=8, help="one session in this many is kept")
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-output", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-dtype", default="int8")
    parser.add_argument("--kv-cache-dir", type=Path, default=Path(tempfile.gettempdir()), help="in a new folder below")
    parser.add_argument("--kv-cache-dir-bytes", default="64MiB")
    parser.add_argument("--memory", default="4MiB", help="the prefix cache in memory, and that of running requests")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--compared", type=int, default=40, help="prompts of the last hour that are asked again")
    parser.add_argument("--timeout", type=float, default=120, metavar="S", help="timeout of one request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, default=8610)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    trace = read_trace(
        options.trace,
        length_scale=options.length_scale,
        max_input=options.max_model_len - options.max_output - 1,
        max_output=options.max_output,
    )
    workload = repeated_hour(trace, options.hours, options.share, options.minutes)
    print(f"{len(workload.requests):,} requests in {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(dir=options.kv_cache_dir) as folder:
        command = [*KVANTA, options.model, "--port", str(options.port), "--kv-cache-dir", folder]
        for name in ("kv_cache_dtype", "kv_cache_dir_bytes", "max_model_len", "block_size"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        command += ["--kv-cache-memory-bytes", options.memory, "--max-queued-requests", str(options.concurrency)]
        with server_process(command, options.port) as server:
            report = asyncio.run(replay(server, workload, Path(folder), options))
    return write_report(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
