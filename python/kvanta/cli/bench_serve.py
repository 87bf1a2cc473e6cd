"""`kvanta bench serve`: an OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from typing import TYPE_CHECKING, Any

from kvanta.cli.arguments import CommandParser, ListOption, real_number, whole_number
from kvanta.cli.report import add_json, output_file, write_report
from kvanta.errors import InputError, ResourceError
from kvanta.loadgen import plot, report, traces, workload
from kvanta.loadgen.goodput import Target, parse_targets
from kvanta.terminal.pictures import check_picture
from kvanta.terminal.progress import progress_bar

if TYPE_CHECKING:
    from kvanta.loadgen.bench import Load, ServerOptions

_DESCRIPTION = """\
An OpenAI-compatible server under load (Kvanta's, vLLM's, or another): time to first token, time per output token and
end-to-end percentiles, throughput, goodput, errors by kind. Prompts are token ids where the server takes them, so that
lengths are exact. Figures are explained in docs/bench-serve.md.

  kvanta bench serve http://127.0.0.1:8000 --requests 64 --input-len 256 --output-len 128
  kvanta bench serve http://127.0.0.1:8000 --rate 1 2 4 8 --goodput ttft:500 tpot:50 --json int4.json
  kvanta bench serve http://127.0.0.1:8000 --rate 2 --slo ttft=5x,itl=3x
  kvanta bench serve http://127.0.0.1:8000 --trace AzureLLMInferenceTrace_conv.csv --requests 500 --max-input-len 2048
  kvanta bench serve --beside bf16.json int8.json int4.json --plot load.png"""
_REQUESTS, _INPUT, _OUTPUT = 100, 256, 128


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta bench serve", description=_DESCRIPTION)
    result.add_argument("URL", nargs="?", help="URL of the server, with or without /v1")
    _add_load(result)
    _add_server(result)
    shown = result.group("report", "figures, names and plots")
    shown.add_argument(
        "--goodput",
        nargs="+",
        action=ListOption,
        default=[],
        metavar="TARGET",
        help="in ms, as ttft:500 tpot:50 itl:200 e2e:5000",
    )
    shown.add_argument(
        "--slo",
        nargs="+",
        action=ListOption,
        default=[],
        metavar="TARGET",
        help="the same in seconds, as ttft=1,itl=0.2, or as multiples of the time alone, as ttft=5x,itl=3x",
    )
    shown.add_argument("--label", metavar="NAME", help="name of this server [its cache's format, or the model]")
    shown.add_argument(
        "--beside", nargs="+", action=ListOption, default=[], metavar="FILE", help="reports to compare with this one"
    )
    shown.add_argument(
        "--plot", type=output_file, metavar="FILE", help="plot of throughput and latency over load: .png, .svg or .pdf"
    )
    add_json(result)
    return result


def _add_load(result: CommandParser) -> None:
    load = result.group("load", "requests, their rate and their lengths")
    load.add_argument(
        "--rate",
        type=real_number,
        nargs="+",
        action=ListOption,
        metavar="R",
        help="requests per second; several: a run each [all at once]",
    )
    load.add_argument("--burstiness", type=real_number, metavar="B", help="1: Poisson; less: in bursts; more: even [1]")
    load.add_argument(
        "--concurrency",
        type=whole_number,
        nargs="+",
        action=ListOption,
        metavar="N",
        help="maximum concurrent requests; several: a run each",
    )
    load.add_argument("--requests", type=whole_number, metavar="N", help=f"per run [{_REQUESTS}; of a trace all]")
    load.add_argument("--input-len", type=whole_number, metavar="N", help=f"tokens of a prompt [{_INPUT}]")
    load.add_argument("--output-len", type=whole_number, metavar="N", help=f"tokens of an answer [{_OUTPUT}]")
    load.add_argument("--length-spread", type=real_number, metavar="S", help="lengths are uniform in 1 ± S [0]")
    load.add_argument(
        "--shared-prefix-len", type=whole_number, metavar="N", help="tokens that all prompts begin with [0]"
    )
    load.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="seed of lengths, arrivals and prompts [0]"
    )
    load.add_argument(
        "--trace",
        metavar="FILE",
        help="arrivals and lengths of a trace, or lengths alone: " + ", ".join(traces.FORMATS),
    )
    load.add_argument("--trace-format", choices=["auto", *traces.FORMATS], default="auto", help="[auto]")
    load.add_argument(
        "--time-scale", type=real_number, metavar="F", help="a trace's times are multiplied: 2 is half the load [1]"
    )
    load.add_argument("--length-scale", type=real_number, metavar="F", help="a trace's lengths are multiplied [1]")
    load.add_argument(
        "--max-input-len", type=whole_number, metavar="N", help="truncates a trace's longer prompts to N tokens"
    )
    load.add_argument(
        "--max-output-len", type=whole_number, metavar="N", help="truncates a trace's longer answers to N tokens"
    )


def _add_server(result: CommandParser) -> None:
    server = result.group("server", "the server that is measured")
    server.add_argument("--model", metavar="NAME", help="as the server calls it [the first that it has]")
    server.add_argument("--api", choices=["completions", "chat"], default="completions", help="[completions]")
    server.add_argument(
        "--prompts", choices=["auto", "ids", "text"], default="auto", help="auto: token ids where the server takes them"
    )
    server.add_argument("--tokenizer", metavar="MODEL", help="tokenizer for token ids, if the server has no /tokenize")
    server.add_argument("--api-key", metavar="KEY", help="[the environment's OPENAI_API_KEY]")
    server.add_argument("--extra-body", metavar="JSON", help="fields for every request, as '{\"top_k\": 1}'")
    server.add_argument("--timeout", type=real_number, default=600.0, metavar="S", help="seconds of one request [600]")


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    earlier = [report.read_report(file) for file in values.beside]
    targets = parse_targets(values.goodput, values.slo)
    if values.plot is not None:
        check_picture(values.plot)
    if values.URL is None:
        if not earlier:
            raise InputError("URL is missing; an example: kvanta bench serve http://127.0.0.1:8000")
        if values.json is not None:
            raise InputError("--json writes what was measured; without a URL nothing is")
        print(report.text_of(earlier))
        measured = []
    else:
        measured = [_measure(values, targets)]
        write_report(values.json, measured[0], report.text_of([*earlier, *measured]))
    if values.plot is not None:
        plot.write_plot(values.plot, [*earlier, *measured])
    if measured and not any(run["completed"] for run in measured[0]["runs"]):
        raise ResourceError("not one request was answered")
    return 0


def _measure(values: argparse.Namespace, targets: dict[str, Target]) -> dict[str, Any]:
    try:
        from kvanta.loadgen.bench import Load, bench_server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "aiohttp":
            raise
        raise InputError(
            "bench serve needs the package aiohttp; install it with: pip install 'kvanta[bench]'"
        ) from None

    options = _server_options(values)
    rates: list[float | None] = values.rate or [None]
    places: list[int | None] = values.concurrency or [None]
    if len(rates) > 1 and len(places) > 1:
        raise InputError("several rates and several concurrencies: runs may differ in one of them")
    loads = [Load(rate, most) for rate in rates for most in places]
    for load in loads:
        workload.check_rate(1.0 if load.rate is None else load.rate)
        if load.concurrency is not None and load.concurrency < 1:
            raise InputError(f"the concurrency is {load.concurrency}; it must be at least 1")
    planned = {load: _workload(values, load) for load in dict.fromkeys(loads)}
    total = sum(len(planned[load].requests) for load in loads)
    with progress_bar(total, "requests", "request") as bar:
        return asyncio.run(
            bench_server(
                options,
                planned.__getitem__,
                loads,
                seed=values.seed,
                targets=targets,
                label=values.label,
                finished=bar.update,
            )
        )


def _server_options(values: argparse.Namespace) -> ServerOptions:
    from kvanta.loadgen.bench import ServerOptions

    if not 0 < values.timeout < math.inf:
        raise InputError(f"the timeout must be above 0, got {values.timeout:g} seconds")
    key = values.api_key or os.environ.get("OPENAI_API_KEY")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("the API key has characters that no HTTP header can carry")
    return ServerOptions(
        url=values.URL,
        model=values.model,
        api=values.api,
        prompts=values.prompts,
        api_key=key,
        timeout_s=values.timeout,
        extra=_extra(values.extra_body),
        ids=_ids(values.tokenizer),
    )


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise InputError(f"--extra-body: {text[:60]!r} is not a JSON object")
    return extra


def _ids(model: str | None) -> tuple[int, ...]:
    """Token ids of common words."""
    if model is None:
        return ()
    from kvanta.checkpoint.resolve import resolve_model
    from kvanta.loadgen.prompts import WORDS
    from kvanta.text.tokenizer import Tokenizer

    return tuple(
        sorted(set(Tokenizer(resolve_model(model).path).encode(" " + " ".join(WORDS), add_special_tokens=False)))
    )


def _workload(values: argparse.Namespace, load: Load) -> workload.Workload:
    of_trace = ("time_scale", "length_scale", "max_input_len", "max_output_len")
    of_synthetic = ("input_len", "output_len", "length_spread", "shared_prefix_len")
    wrong = of_synthetic if values.trace is not None else of_trace
    for name in wrong:
        if getattr(values, name) is not None:
            flag, only = f"--{name.replace('_', '-')}", "without" if values.trace is not None else "with"
            raise InputError(f"{flag} has a meaning only {only} --trace")
    workload.check_seed(values.seed)
    if values.trace is None:
        return workload.synthetic(
            requests=_or(values.requests, _REQUESTS),
            rate=math.inf if load.rate is None else load.rate,
            burstiness=_or(values.burstiness, 1.0),
            input_tokens=_or(values.input_len, _INPUT),
            output_tokens=_or(values.output_len, _OUTPUT),
            spread=_or(values.length_spread, 0.0),
            shared_prefix=_or(values.shared_prefix_len, 0),
            seed=values.seed,
        )
    read = traces.read_trace(
        values.trace,
        trace_format=values.trace_format,
        requests=values.requests,
        length_scale=_or(values.length_scale, 1.0),
        max_input=values.max_input_len,
        max_output=values.max_output_len,
    )
    if read.source["kind"] == traces.LENGTHS:
        if values.time_scale is not None:
            raise InputError("--time-scale has a meaning only for a trace with times; this one has lengths alone")
        rate = math.inf if load.rate is None else load.rate
        return read.arriving(rate, _or(values.burstiness, 1.0), values.seed)
    if values.burstiness is not None:
        raise InputError("--burstiness needs a trace without times")
    if load.rate is not None:
        if values.time_scale is not None:
            raise InputError("--rate and --time-scale both say how fast the trace is replayed; give one of them")
        return read.at_rate(load.rate)
    return read.stretched(_or(values.time_scale, 1.0))


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
