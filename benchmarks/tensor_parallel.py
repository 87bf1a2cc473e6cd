"""Speed and memory of tensor and pipeline parallelism on one machine, next to one process with as many threads.

    python benchmarks/random_gguf.py llama-1b Q4_K_M llama-1b.gguf
    python benchmarks/tensor_parallel.py llama-1b.gguf --json docs/results/tensor-parallel.json

Each engine has its own process, and they take turns, --turns times: a prompt that is in no cache, then tokens that
one request generates after it, and --sequences at once. Rates are medians. All must generate the same tokens, which is
checked first. With --mbit, each rank is on a separate node, with a network of that rate between the two.
Memory is the proportional set size of each process, which divides pages of the model's file among those that map them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import network
import numpy as np
from server_process import descendants, free_port

from kvanta import LLM, SamplingParams

SIZES = {
    "TP": ("tensor_parallel_size",),
    "PP": ("pipeline_parallel_size",),
    "DCP": ("tensor_parallel_size", "decode_context_parallel_size"),
}
_TOKENS_OF_RANDOM_PROMPT = (1000, 30000)


def serve(connection: Connection, options: argparse.Namespace, division: str | None) -> None:
    """An engine, divided into ranks or not; answers each message with a dictionary until it gets None."""
    ranks = options.ranks if division else 1
    arguments: dict[str, Any] = {
        "threads": options.threads // ranks,
        "kv_cache_dtype": options.kv_cache_dtype,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes // ranks,
        "max_model_len": options.prompt_tokens + 1 + options.tokens,
        "max_num_seqs": options.sequences,
    }
    if division:
        arguments |= dict.fromkeys(SIZES[division], ranks)
    if division and options.mbit:
        network.enter(0)
        arguments |= {"nnodes": ranks, "master_addr": network.ADDRESSES[0], "master_port": free_port()}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
        command = [sys.executable, "-m", "kvanta", "serve", options.model, *flags, "--node-rank=1"]
        subprocess.Popen(["ip", "netns", "exec", network.NODES[1], *command])  # it ends with this engine
    llm = LLM(options.model, **arguments)
    random = np.random.default_rng(1)
    prompt = random.integers(*_TOKENS_OF_RANDOM_PROMPT, options.prompt_tokens).tolist()
    greedy = SamplingParams(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    connection.send({})
    while connection.recv() is not None:
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=1), use_tqdm=False)
        read = time.perf_counter()
        # Whole pages of the prompt come from the prefix cache now.
        longer = [{"prompt_token_ids": [*prompt, prompt[i]]} for i in range(options.sequences)]
        llm.generate(longer[0], greedy, use_tqdm=False)
        alone = time.perf_counter()
        outputs = llm.generate(longer, greedy, use_tqdm=False)
        end = time.perf_counter()
        pids = [os.getpid(), *descendants(os.getpid())]
        connection.send(
            {
                "tokens": [output.outputs[0].token_ids for output in outputs],
                "prompt_tokens_per_s": options.prompt_tokens / (read - start),
                "tokens_per_s": options.tokens / (alone - read),
                "batch_tokens_per_s": options.sequences * options.tokens / (end - alone),
                "weight_bytes": llm.stats()["weight_bytes"],
                "pss_bytes": [pss_bytes(pid) for pid in pids],
            }
        )


def pss_bytes(pid: int) -> int:
    """Memory of a process, of which shared pages count in proportion."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("Pss:"))
    return int(line.split()[1]) << 10


@contextmanager
def engine(options: argparse.Namespace, division: str | None) -> Iterator[Connection]:
    """The connection to the process of an engine that is ready."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, options, division))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield ours
        ours.send(None)
    finally:
        process.join(10)
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument(
        "--divisions",
        choices=SIZES,
        nargs="+",
        default=["TP", "PP"],
        help="tensors, layers, tensors and latents (MLA) [TP PP]",
    )
    parser.add_argument("--sequences", type=int, default=4, metavar="N", help="that generate tokens at once [4]")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="of all ranks")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="generated by each request [64]")
    parser.add_argument("--kv-cache-dtype", default="int4", metavar="FORMAT")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=1 << 26, metavar="N", help="of all ranks")
    parser.add_argument("--mbit", type=int, default=0, metavar="N", help="Mbit/s between two nodes [one node]")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads % options.ranks:
        parser.error(f"--threads {options.threads} do not divide among {options.ranks} ranks")
    if options.mbit and options.ranks != len(network.NODES):
        parser.error(f"--mbit: --ranks {options.ranks}; there are {len(network.NODES)} nodes, with a rank each")
    divisions = (None, *options.divisions)
    with ExitStack() as stack:
        if options.mbit:
            stack.enter_context(network.two_nodes(options.mbit))
        engines = [stack.enter_context(engine(options, division)) for division in divisions]

        def take_turns() -> list[dict[str, Any]]:
            results = []
            for connection in engines:
                connection.send({})
                results.append(connection.recv())
            return results

        first = take_turns()  # also loads what is loaded by the first use
        for division, result in zip(divisions, first, strict=True):
            if result["tokens"] != first[0]["tokens"]:
                raise SystemExit(f"error: {options.ranks} ranks ({division}) generate other tokens than one process")
        turns = [take_turns() for _ in range(options.turns)]
    rows: list[dict[str, Any]] = []
    for index, division in enumerate(divisions):
        ranks = options.ranks if division else 1
        results = [turn[index] for turn in turns]
        row: dict[str, Any] = {
            "ranks": f"{division} {ranks}" if division else "1",
            "threads_of_each": options.threads // ranks,
        }
        for key in ("prompt_tokens_per_s", "tokens_per_s", "batch_tokens_per_s"):
            row[key] = median(result[key] for result in results)
        row["weights_mib"] = results[-1]["weight_bytes"] / 2**20
        row["pss_mib"] = [size / 2**20 for size in results[-1]["pss_bytes"]]
        row["largest_pss_mib"] = max(row["pss_mib"])
        rows.append(row)
        keys = ("prompt_tokens_per_s", "tokens_per_s", "batch_tokens_per_s", "weights_mib", "largest_pss_mib")
        row["times"] = {key: row[key] / rows[0][key] for key in keys}
        print(json.dumps(row))
    if options.json:
        report = {
            key: getattr(options, key)
            for key in ("kv_cache_dtype", "prompt_tokens", "sequences", "tokens", "turns", "mbit")
        }
        report = {"model": Path(options.model).name, **report, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
