"""Costs of one replica for `kvanta plan --fleet`: prompts and decode steps by depth and batch, and the rate of loading.

    python benchmarks/fleet_costs.py smollm2 --formats bf16 fp8 int4 --json costs.json
    kvanta plan smollm2 --fleet TRACE --costs costs.json

Seconds per prompt token and its growth with depth come from prompts of two lengths, those of decode steps from one and
several sequences at two depths, medians of the repeats. Loading: --kv-store, or a folder in its place, by a new engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config

STEPS = 32


def run(engine: _core.Engine, prompts: list[list[int]], answer: int) -> tuple[float, float]:
    """Seconds to the last sequence's first token, and of a step after it."""
    sampling = _core.SamplingParams()
    sampling.max_tokens, sampling.ignore_eos, sampling.temperature = answer, True, 0.0
    begin = time.monotonic()
    for index, prompt in enumerate(prompts):
        engine.add(f"{index}", prompt, sampling)
    started: set[str] = set()
    first, ends = 0.0, []
    while (outputs := engine.step()) is not None:
        for each in outputs:
            if each.error:
                raise SystemExit(f"error: {each.error}")
        started |= {each.id for each in outputs if each.tokens}
        if len(started) < len(prompts):
            continue
        first = first or time.monotonic() - begin
        if len(outputs) == len(prompts):
            ends.append(time.monotonic())
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return first, statistics.median(steps) if steps else 0.0


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return [seed % 97 + 3, *((seed * 31 + i * i) % 400 + 3 for i in range(tokens - 1))]


def prompt_costs(short: int, short_s: float, long: int, long_s: float) -> tuple[float, float]:
    """prefill_token_s and prefill_depth_s, a and b of t(n) = n a + n^2 b / 2, from the times of two lengths."""
    growth = max(0.0, 2 * (long_s / long - short_s / short) / (long - short))
    token = short_s / short - growth * short / 2
    if token <= 0:  # the short prompts are too short to tell: one rate for all depths
        return long_s / long, 0.0
    return token, growth


def measure(options: argparse.Namespace, model: str, name: str) -> dict[str, Any]:
    """The costs with one cache format."""
    short, long = options.short, options.long
    arguments: dict[str, Any] = {
        "kv_cache_dtype": name,
        "max_model_len": long + 2 * STEPS,
        "threads": options.threads,
        "max_num_seqs": options.max_num_seqs,
        "block_size": options.block_size,
        "enable_prefix_caching": False,
    }
    engine = _core.Engine(engine_config(model, arguments))
    run(engine, [prompt_of(64, 1)], 4)  # weights into memory
    times: dict[str, list[float]] = {"short": [], "long": [], "step": [], "deep": [], "batch": []}
    for repeat in range(options.repeats):
        first, step = run(engine, [prompt_of(short, 2 + repeat)], STEPS)
        times["short"].append(first)
        times["step"].append(step)
        first, step = run(engine, [prompt_of(long, 20 + repeat)], STEPS)
        times["long"].append(first)
        times["deep"].append(step)
        batch = [prompt_of(16, 40 + index) for index in range(options.batch)]
        times["batch"].append(run(engine, batch, STEPS)[1])
    median = {key: statistics.median(values) for key, values in times.items()}
    per_depth = max(0.0, (median["deep"] - median["step"]) / (long - short))
    token, growth = prompt_costs(short, median["short"], long, median["long"])
    config = engine_config(model, arguments)
    costs = {
        "step_s": max(1e-9, median["step"] - per_depth * (short + STEPS / 2)),
        "prefill_token_s": token,
        "prefill_depth_s": growth,
        "decode_depth_s": per_depth,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
    }
    depth = options.batch * (16 + STEPS / 2)
    costs["decode_sequence_s"] = max(0.0, (median["batch"] - costs["step_s"] - depth * per_depth) / (options.batch - 1))
    return {**costs, **loading(options, model, {**arguments, "enable_prefix_caching": True})}


def loading(options: argparse.Namespace, model: str, arguments: dict[str, Any]) -> dict[str, float]:
    """The rate at which another engine's pages are read, and the time of a lookup and one page."""
    tier = "store" if options.kv_store else "disk"
    with tempfile.TemporaryDirectory() as folder:
        place = {"kv_store": options.kv_store} if options.kv_store else {"kv_cache_dir": folder}
        prompt = prompt_of(options.long, int(time.time()))
        for _ in range(2):
            engine = _core.Engine(engine_config(model, {**arguments, **place}))
            run(engine, [prompt], 1)
            engine.flush_prefix_cache()
            stats = engine.stats()[tier]
            del engine
    if not stats["read_bytes"]:
        raise SystemExit(f"error: no page was read from {tier}: {stats}")
    return {"load_bytes_per_s": stats["read_bytes"] / stats["read_seconds"], "load_s": options.load_latency}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "int4"])
    parser.add_argument("--short", type=int, default=512, metavar="N", help="tokens of the short prompts")
    parser.add_argument("--long", type=int, default=4096, metavar="N", help="tokens of the long ones")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences that decode together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument(
        "--kv-store", default="", metavar="URL", help="store whose rate is measured, in place of a disk"
    )
    parser.add_argument("--load-latency", type=float, default=0.002, metavar="S", help="of a lookup in the store")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.batch < 2:
        parser.error(f"--batch {options.batch}: the cost of a sequence in a step needs 2 or more")
    model = str(resolve_model(options.model).path)
    formats = {}
    for name in options.formats:
        formats[name] = measure(options, model, name)
        print(name, json.dumps(formats[name]), flush=True)
    options.json.write_text(json.dumps({"model": options.model, "formats": formats}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
