"""`kvanta bench engine`: the engine of this process under load, without HTTP."""

from __future__ import annotations

import argparse
import math
from typing import Any

from kvanta.calibration.automatic import add_query_matrices
from kvanta.checkpoint.resolve import resolve_model
from kvanta.cli.arguments import (
    CommandParser,
    ListOption,
    add_engine_options,
    add_model,
    engine_arguments,
    model_of,
    real_number,
    whole_number,
)
from kvanta.cli.report import add_json, write_report
from kvanta.engine.config import engine_config
from kvanta.errors import InputError, ResourceError
from kvanta.loadgen import report, workload
from kvanta.loadgen.engine_load import EngineLoad, bench_engine
from kvanta.loadgen.goodput import Goodput, parse_targets
from kvanta.terminal.progress import progress_bar
from kvanta.terminal.tables import render_table

_DESCRIPTION = """\
The engine under load: what `kvanta bench serve` measures, without HTTP, tokenizer or another process, and what a step
costs outside the model. Prompts are random token ids. Figures are explained in docs/bench-serve.md.

  kvanta bench engine smollm2 --kv-cache-dtype int4 --requests 64 --input-len 256 --output-len 128
  kvanta bench engine stories260k --requests 64 --input-len 16 --output-len 64 --profile"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta bench engine", description=_DESCRIPTION)
    add_model(result)
    load = result.group("load", "requests, their rate and their lengths")
    load.add_argument("--requests", type=whole_number, default=64, metavar="N", help="per run [64]")
    load.add_argument("--input-len", type=whole_number, default=256, metavar="N", help="tokens of a prompt [256]")
    load.add_argument("--output-len", type=whole_number, default=128, metavar="N", help="tokens of an answer [128]")
    load.add_argument("--length-spread", type=real_number, default=0.0, metavar="S", help="uniform in 1 ± S [0]")
    load.add_argument(
        "--shared-prefix-len", type=whole_number, default=0, metavar="N", help="tokens that all prompts begin with [0]"
    )
    load.add_argument(
        "--rate",
        type=real_number,
        nargs="+",
        action=ListOption,
        metavar="R",
        help="requests per second; several: a run each [at once]",
    )
    load.add_argument("--burstiness", type=real_number, default=1.0, metavar="B", help="1: Poisson; less: bursts [1]")
    load.add_argument("--concurrency", type=whole_number, metavar="N", help="maximum concurrent requests")
    load.add_argument("--load-seed", type=whole_number, default=0, metavar="N", help="seed of lengths and prompts [0]")
    load.add_argument(
        "--goodput", nargs="+", action=ListOption, default=[], metavar="TARGET", help="in ms, as ttft:500 tpot:50"
    )
    result.add_argument("--profile", action="store_true", help="where a step's time goes; slows small models a little")
    result.add_argument(
        "--label", metavar="NAME", help="name of this engine in bench serve --beside [its cache's format]"
    )
    add_json(result)
    add_engine_options(result)
    return result


def _load(values: argparse.Namespace, rate: float | None) -> EngineLoad:
    planned = workload.synthetic(
        requests=values.requests,
        rate=math.inf if rate is None else rate,
        burstiness=values.burstiness,
        input_tokens=values.input_len,
        output_tokens=values.output_len,
        spread=values.length_spread,
        shared_prefix=values.shared_prefix_len,
        seed=values.load_seed,
    )
    return EngineLoad(planned, rate, values.concurrency)


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    targets = parse_targets(values.goodput)
    goodput = Goodput(targets) if targets else None
    if values.concurrency is not None and values.concurrency < 1:
        raise InputError(f"the concurrency is {values.concurrency}; it must be at least 1")
    rates: list[float | None] = values.rate or [None]
    loads = [_load(values, rate) for rate in rates]
    folder = resolve_model(model_of(values))
    arguments = engine_arguments(values)
    config = engine_config(str(folder.path), arguments)
    config.profile = values.profile
    add_query_matrices(config, folder.name, arguments, allowed=True)
    with progress_bar(sum(len(load.workload.requests) for load in loads), "requests", "request") as bar:
        engine, runs = bench_engine(config, loads, seed=values.load_seed, goodput=goodput, finished=bar.update)
    result = {
        "url": "engine",
        "model": folder.name,
        "label": values.label or engine.config.kv_cache_dtype,
        "engine": "kvanta",
        "cache_dtype": engine.config.kv_cache_dtype,
        "max_model_len": engine.config.max_model_len,
        "api": "engine",
        "prompts": "ids",
        "exact_lengths": True,
        "workload": loads[0].workload.source,
        "runs": runs,
    }
    write_report(values.json, result, _text(result))
    if not any(each["completed"] for each in runs):
        raise ResourceError("not one request was answered")
    return 0


def _median(distribution: dict[str, float] | None) -> str:
    return "-" if distribution is None else f"{distribution['p50']:.3f}"


def _text(result: dict[str, Any]) -> str:
    header = [
        "requests/s",
        "steps",
        "ms per step",
        "model",
        "outside it",
        "schedule",
        "sample",
        "callback",
        "preempted",
    ]
    header += ["max running", "outside it then (p50)"]
    names = ("step_ms", "model_ms", "outside_model_ms", "schedule_ms", "sample_ms", "callback_ms")
    rows, parts = [], []
    for each in result["runs"]:
        figures = each["engine"]
        rate = "all at once" if each["rate"] is None else f"{each['rate']:.4g}"
        row = [rate, f"{figures['steps']:,}", *(f"{figures[name]:.3f}" for name in names)]
        row += [f"{figures[name]:,}" for name in ("preemptions", "most_tokens_per_step")]
        rows.append([*row, _median(figures["full_step_outside_model_ms"])])
        if figures["profile"]:
            cells = [
                [row["name"], f"{row['ms_per_step']:.3f}", f"{row['ms_per_step'] / figures['step_ms']:.1%}"]
                for row in figures["profile"]
                if row["calls"]
            ]
            parts += ["", render_table([f"model, at {rate}", "ms per step", "of a step"], cells, left=(0,))]
    return "\n".join([report.text_of([result]), "", render_table(header, rows), *parts])
