"""Number of concurrent users that fit in a fixed cache memory, and their total throughput, per cache format.

    python benchmarks/more_users.py smollm2 --json docs/results/more-users.json --plot docs/results/more-users.png

Every user sends a prompt of --prompt-tokens and gets --output-tokens; --requests of them arrive at once, more than any
format holds, and prefixes are not shared. The number is found by running them: the maximum that decode in one step
without preemption. One more is also run and must fail. Users must get the same tokens in all runs.

The engine has one thread, and rates are per second of its CPU time, independent of other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvanta import _core
from kvanta.checkpoint.resolve import resolve_model
from kvanta.engine.config import engine_config
from kvanta.fleet.plan import plan
from kvanta.options.option import parse_bytes
from kvanta.terminal.pictures import check_picture, new_figure, save_figure

FORMATS = ("bf16", "fp8", "int8", "int4", "int4+exact=none", "kivi4")
REFERENCE = "bf16"


@dataclass(frozen=True)
class Users:
    """Prompt and output of each user, in tokens."""

    prompt: int
    output: int
    vocab: int

    def prompt_of(self, number: int) -> list[int]:
        random = np.random.default_rng([7, number])
        return [int(token) for token in random.integers(0, self.vocab, size=self.prompt)]


@dataclass
class Trial:
    """Outcome of users who arrive at once."""

    users: int
    most_running: int = 0
    most_decoding: int = 0
    """Most sequences that got a token in one step."""
    preemptions: int = 0
    seconds: float = 0.0
    """Total seconds of computing."""
    decode_seconds: list[float] = field(default_factory=list)
    """Seconds of the steps in which as many decoded as may run."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Tokens by user; incomplete if one was preempted and the trial given up."""

    def holds(self, count: int) -> bool:
        """True if `count` users were served concurrently."""
        return self.most_decoding >= count and self.preemptions == 0


def run_together(engine: _core.Engine, users: Users, count: int, *, give_up: bool = False) -> Trial:
    """Runs `count` users at once until all are answered, or, with `give_up`, until one is preempted."""
    trial = Trial(count)
    limit = min(count, engine.config.max_num_seqs)
    before = engine.stats()["preemptions"]
    names = [f"{count}-{number}" for number in range(count)]
    for number, name in enumerate(names):
        sampling = _core.SamplingParams()
        sampling.max_tokens, sampling.ignore_eos, sampling.temperature = users.output, True, 0.0
        engine.add(name, users.prompt_of(number), sampling)
    for outputs, seconds in steps(engine):
        stats = engine.stats()
        decoding = sum(len(each.tokens) for each in outputs)
        for each in outputs:
            trial.tokens.setdefault(int(each.id.partition("-")[2]), []).extend(each.tokens)
        trial.seconds += seconds
        trial.most_running = max(trial.most_running, stats["running"])
        trial.most_decoding = max(trial.most_decoding, decoding)
        trial.preemptions = stats["preemptions"] - before
        errors = [each.error for each in outputs if each.error]
        if errors:
            raise SystemExit(f"error: {errors[0]}")
        if decoding == limit:
            trial.decode_seconds.append(seconds)
        if give_up and trial.preemptions:
            for name in names:
                engine.abort(name)
    return trial


def check_tokens(one: Trial, other: Trial) -> None:
    """Raises SystemExit unless users got the same tokens in both trials, as far as these went."""
    for number in one.tokens.keys() & other.tokens.keys():
        pairs = zip(one.tokens[number], other.tokens[number], strict=False)
        if any(left != right for left, right in pairs):
            raise SystemExit(f"error: user {number} gets other tokens among {other.users} than among {one.users}")


def steps(engine: _core.Engine) -> Iterator[tuple[list[_core.EngineOutput], float]]:
    """Outputs and CPU time of each step, until there is nothing to do."""
    while True:
        begin = time.process_time()
        outputs = engine.step()
        if outputs is None:
            return
        yield outputs, time.process_time() - begin


@dataclass(frozen=True)
class Held:
    """Maximum users that fit, the trial of one more, and the throughput at saturation with that many."""

    users: int
    one_more: Trial
    crowd: Trial
    bytes_per_token: float


def most_users(make_engine: Callable[[int], _core.Engine], users: Users, guess: int, crowd: int) -> Held:
    """Finds the maximum. make_engine: makes an engine for at most this many sequences. crowd: users at saturation."""
    count = max(1, guess)
    while True:
        engine = make_engine(count)
        served = run_together(engine, users, crowd)
        if served.holds(count):
            break
        if count == 1:
            raise SystemExit("error: the cache does not hold a single user")
        count -= 1
    while True:
        one_more = run_together(make_engine(count + 1), users, count + 1, give_up=True)
        check_tokens(served, one_more)
        if not one_more.holds(count + 1):
            return Held(count, one_more, served, engine.stats()["bytes_per_token"])
        count += 1
        engine = make_engine(count)
        served = run_together(engine, users, crowd)


def page_size(name: str, smallest: int) -> int:
    """Page size of a format: KIVI's scales cover 32 tokens."""
    return max(smallest, 32) if "kivi" in name else smallest


def measure(options: argparse.Namespace, name: str, folder: Path) -> dict[str, Any]:
    """One row of the report."""
    page = page_size(name, options.page_size)
    context = options.prompt_tokens + options.output_tokens

    def make_engine(max_num_seqs: int) -> _core.Engine:
        arguments = {
            "kv_cache_dtype": name,
            "kv_cache_memory_bytes": options.memory,
            "max_model_len": context,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": options.batched_tokens,
            "block_size": page,
            "enable_prefix_caching": False,
            "threads": 1,
        }
        return _core.Engine(engine_config(str(folder), arguments))

    planned = plan(str(folder), formats=[name], context=context, options={"block_size": page})["formats"][0]
    users = Users(options.prompt_tokens, options.output_tokens, _core.read_model_info(str(folder)).vocab)
    held = most_users(make_engine, users, parse_bytes(options.memory) // planned["sequence_bytes"], options.requests)
    if held.users >= options.requests:
        raise SystemExit(f"error: {name} holds {held.users} users; --requests {options.requests} is no saturation")
    row = {
        "format": name,
        "page_size": page,
        "bytes_per_token": held.bytes_per_token,
        "sequence_bytes": planned["sequence_bytes"],
        "users": held.users,
        "one_more": {
            "users": held.one_more.users,
            "most_decoding": held.one_more.most_decoding,
            "preemptions": held.one_more.preemptions,
        },
        "decode_tokens_per_s": held.users / median(held.crowd.decode_seconds),
        "saturated_tokens_per_s": options.requests * context / held.crowd.seconds,
    }
    print(
        f"{name:18} {held.users:3} users, {row['decode_tokens_per_s']:7.1f} new tokens/s, "
        f"{row['saturated_tokens_per_s']:7.1f} tokens/s at saturation",
        flush=True,
    )
    return row


def beside_reference(rows: list[dict[str, Any]]) -> None:
    """Adds each figure as a multiple of the reference's, since absolute rates depend on the machine."""
    first = next(row for row in rows if row["format"] == REFERENCE)
    for row in rows:
        row["times"] = {
            "users": row["users"] / first["users"],
            "decode": row["decode_tokens_per_s"] / first["decode_tokens_per_s"],
            "saturated": row["saturated_tokens_per_s"] / first["saturated_tokens_per_s"],
        }


def write_plot(file: str, report: dict[str, Any]) -> None:
    """Plots users and both throughputs of every format."""
    rows = report["rows"]
    figure = new_figure(13, 4.6)
    names = [row["format"] for row in rows]
    panels = {
        "users": ("Users at one time without preemption", [row["users"] for row in rows]),
        "decode": ("New tokens per second while all decode", [row["decode_tokens_per_s"] for row in rows]),
        "saturated": ("All tokens per second at saturation", [row["saturated_tokens_per_s"] for row in rows]),
    }
    figure.suptitle(
        f"{report['model']}: {report['memory_bytes'] / 2**20:g} MiB of cache, {report['prompt_tokens']:,} tokens in, "
        f"{report['output_tokens']:,} out"
    )
    for axes, (key, (title, values)) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        bars = axes.barh(names, values, color=["#7a8794" if name == REFERENCE else "#0b6e99" for name in names])
        axes.bar_label(bars, [f"{row['times'][key]:.2f}x" for row in rows], padding=3, fontsize=9)
        axes.set_title(title, fontsize=11)
        axes.margins(x=0.18)
        axes.grid(True, axis="x", alpha=0.25, linewidth=0.6)
        axes.invert_yaxis()
    save_figure(figure, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", default="96MiB")
    parser.add_argument("--prompt-tokens", type=int, default=1920)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=8, help="requests that arrive at once")
    parser.add_argument("--batched-tokens", type=int, default=128, help="tokens computed in one step")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page; 32 where a format requires it")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot")
    options = parser.parse_args()
    if REFERENCE not in options.formats:
        parser.error(f"--formats lacks {REFERENCE}, to which all others are compared")
    if options.plot:
        check_picture(options.plot)

    warnings.simplefilter("ignore")  # warnings of scales of 1.0: `kvanta eval` measures accuracy
    folder = resolve_model(options.model).path
    rows = [measure(options, name, folder) for name in options.formats]
    beside_reference(rows)
    report = {
        "model": options.model,
        "memory_bytes": parse_bytes(options.memory),
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "requests": options.requests,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.plot:
        write_plot(options.plot, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
