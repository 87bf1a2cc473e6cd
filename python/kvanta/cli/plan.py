"""`kvanta plan`: how many tokens and users fit in a memory."""

from __future__ import annotations

import argparse
from typing import Any

from kvanta.cli.arguments import CommandParser, add_engine_options, add_model, engine_arguments, model_of, whole_number
from kvanta.cli.report import add_json, write_report
from kvanta.engine_options import by_name, parse_bytes
from kvanta.plan import plan
from kvanta.text_table import human_bytes, render_table

_DESCRIPTION = """\
How many tokens and users fit in a memory, per cache format: what is really allocated, padding included.

  kvanta plan smollm2 --memory 8GiB --context 8192
  kvanta plan smollm2 --memory 2GiB --formats bf16 int8 'k=int8,v=int4' --json plan.json"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta plan", description=_DESCRIPTION)
    add_model(result)
    result.add_argument("--memory", default="8GiB", metavar="SIZE", help="memory for weights and cache [8GiB]")
    result.add_argument("--context", type=whole_number, metavar="N", help="tokens per user [the model's limit]")
    result.add_argument("--formats", nargs="+", metavar="FORMAT", help="cache formats [all that the model can take]")
    add_json(result)
    add_engine_options(result)
    return result


def _text(report: dict[str, Any]) -> str:
    rows = [
        [
            row["name"],
            f"{row['bits_per_element']:.4g}",
            f"{row['bytes_per_token']:,.0f}",
            f"{row['tokens']:,}",
            f"{row['sequences']:,}",
            f"{row['ratio_to_bf16']:.2f}x",
        ]
        for row in report["formats"]
    ]
    title = (
        f"{report['model']} in {human_bytes(report['memory_bytes'])}: "
        f"{human_bytes(report['weight_bytes'])} of weights, "
        f"{human_bytes(report['cache_bytes'])} of cache in pages of {report['page_size']} tokens"
    )
    header = ["format", "bits", "bytes/token", "tokens", f"users of {report['context']:,}", "to bf16"]
    return f"{title}\n\n{render_table(header, rows)}"


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    options = engine_arguments(values)
    named = options.pop("kv_cache_dtype", None)
    formats = values.formats or ([named] if named else None)
    longest = options.pop("max_model_len", None)
    context = values.context
    if context is None and longest is not None:
        context = by_name()["max_model_len"].read(longest)
    report = plan(model_of(values), parse_bytes(values.memory), formats, context, options)
    write_report(values.json, report, _text(report))
    return 0
