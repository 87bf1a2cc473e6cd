"""`kvanta plan`: how many tokens and users fit in a memory."""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import Any

from kvanta.checkpoint.resolve import example_configs
from kvanta.cli.arguments import (
    CommandParser,
    ListOption,
    add_engine_options,
    add_model,
    engine_arguments,
    formats_of,
    model_of,
    real_number,
    whole_number,
)
from kvanta.cli.help_page import less_common
from kvanta.cli.report import add_json, output_file, write_report
from kvanta.engine.summary import stored_as
from kvanta.errors import InputError
from kvanta.fleet.plan import plan
from kvanta.fleet.report import DEFAULT_FORMATS, FleetQuestion, costs_by_format, draw_fleet, fleet_text, plan_fleet
from kvanta.fleet.simulate import ROUTINGS
from kvanta.loadgen.traces import read_trace
from kvanta.options.engine import by_name
from kvanta.options.option import parse_bytes
from kvanta.terminal.pictures import check_picture
from kvanta.terminal.tables import human_bytes, render_table

_DESCRIPTION = f"""\
How many tokens and users fit in a memory, per cache format: what the engine really allocates, padding included. No
weights are needed: MODEL may be a config.json, or the name of an example config:
{textwrap.fill(", ".join(example_configs()), 116, break_on_hyphens=False)}.

  kvanta plan llama-3.1-8b --memory 24GiB --context 32768
  kvanta plan ./my-model/config.json
  kvanta plan smollm2 --memory 2GiB --formats bf16 int8 'k=int8,v=int4' --json plan.json

With --fleet, the time to the first token of a trace over several replicas, simulated:

  kvanta plan llama-3.1-8b --memory 24GiB --fleet conversation_trace.jsonl --costs costs.json --target-ttft 2"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta plan", description=_DESCRIPTION)
    add_model(result)
    result.add_argument(
        "--memory", metavar="SIZE", help="memory for weights and cache [8GiB, or what leaves the weights some room]"
    )
    result.add_argument("--context", type=whole_number, metavar="N", help="tokens per user [the model's limit]")
    result.add_argument(
        "--formats", nargs="+", action=ListOption, metavar="FORMAT", help="cache formats [all that the model can take]"
    )
    add_json(result)
    _add_fleet(result)
    add_engine_options(result)
    return result


def _add_fleet(result: CommandParser) -> None:
    group = result.group("fleet", "replicas, simulated on a trace")
    group.add_argument("--fleet", metavar="TRACE", help="trace of Azure or Mooncake to simulate replicas on")

    def add(*flags: str, **details: Any) -> None:
        less_common(group.add_argument(*flags, **details))

    add("--costs", metavar="FILE", help="costs of a replica, as benchmarks/fleet_costs.py writes them")
    add(
        "--replicas",
        nargs="+",
        action=ListOption,
        type=whole_number,
        default=[1, 3, 10],
        metavar="N",
        help="numbers of replicas [1 3 10]",
    )
    add(
        "--routing",
        nargs="+",
        action=ListOption,
        choices=tuple(ROUTINGS),
        default=list(ROUTINGS),
        metavar="ROUTING",
        help=f"how requests are divided among them (docs/plan.md): {', '.join(ROUTINGS)} [all]",
    )
    add("--cpus", type=real_number, metavar="N", help="CPUs that the replicas share [each has its own]")
    add(
        "--target-ttft",
        type=real_number,
        metavar="S",
        help="also the replicas it takes until 99 %% of first tokens come within S seconds",
    )
    add("--store-bytes", metavar="SIZE", help="size of the shared store [no limit]")
    add("--requests", type=whole_number, metavar="N", help="number of requests, the first of the trace [all]")
    add("--time-scale", type=real_number, default=1.0, metavar="X", help="multiplies times of arrival [1]")
    add("--length-scale", type=real_number, default=1.0, metavar="X", help="multiplies lengths [1]")
    add("--max-input-len", type=whole_number, metavar="N", help="truncates longer prompts to N tokens")
    add("--max-output-len", type=whole_number, metavar="N", help="truncates longer answers to N tokens")
    add("--plot", type=output_file, metavar="FILE", help="picture of the fleet: .png, .svg or .pdf")


def _fleet(values: argparse.Namespace, report: dict[str, Any]) -> None:
    if values.costs is None:
        raise InputError("--fleet needs --costs FILE; benchmarks/fleet_costs.py MODEL --json FILE measures them")
    if values.plot is not None:
        check_picture(values.plot)
    workload = read_trace(
        values.fleet,
        requests=values.requests,
        length_scale=values.length_scale,
        max_input=values.max_input_len,
        max_output=values.max_output_len,
    ).stretched(values.time_scale)
    question = FleetQuestion(
        replicas=values.replicas,
        routings=values.routing,
        target_ttft_s=values.target_ttft,
        cpus=values.cpus,
        store_bytes=math.inf if values.store_bytes is None else parse_bytes(values.store_bytes),
    )
    costs = costs_by_format(values.costs, [row["name"] for row in report["formats"]])
    fleet = plan_fleet(report, workload, costs, question)
    write_report(values.json, fleet, fleet_text(fleet))
    if values.plot is not None:
        draw_fleet(values.plot, fleet)


def _bytes_per_token(row: dict[str, Any]) -> str:
    first, floor = (f"{row[name]:,.0f}" for name in ("bytes_per_token", "floor_bytes_per_token"))
    return first if first == floor else f"{first} to {floor}"


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            row["name"],
            f"{row['bits_per_element']:.4g}",
            _bytes_per_token(row),
            f"{row['tokens']:,}",
            f"{row['sequences']:,}",
            f"{row['ratio_to_bf16']:.2f}x",
        ]
        for row in report["formats"]
    ]
    weights = stored_as(report["weight_dtype"], report["dtype"], report["weight_bytes"], report["parameters"])
    title = (
        f"{report['model']} in {human_bytes(report['memory_bytes'])}: "
        f"{human_bytes(report['weight_bytes'])} of weights ({report['parameters'] / 1e9:.2f} billion, "
        f"{weights}), "
        f"{human_bytes(report['cache_bytes'])} of cache in pages of {report['page_size']} tokens"
    )
    header = ["format", "bits", "bytes/token", "tokens", f"users of {report['context']:,}", "to bf16"]
    return f"{title}\n\n{render_table(header, rows)}"


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    options = engine_arguments(values)
    formats = formats_of(values, options)
    if values.fleet is not None:
        formats = formats or DEFAULT_FORMATS
    longest = options.pop("max_model_len", None)
    context = values.context
    if context is None and longest is not None:
        context = by_name()["max_model_len"].read(longest)
    memory = None if values.memory is None else parse_bytes(values.memory)
    report = plan(model_of(values), memory, formats, context, options)
    if values.fleet is not None:
        _fleet(values, report)
        return 0
    write_report(values.json, report, _text(report))
    return 0
