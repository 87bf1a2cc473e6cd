"""`kvanta plan`: how many tokens and users fit in a memory."""

from __future__ import annotations

import argparse
from typing import Any

from kvanta.cli.arguments import CommandParser, add_engine_options, add_model, engine_arguments, model_of, whole_number
from kvanta.cli.report import add_json, write_report
from kvanta.engine_options import by_name
from kvanta.models import example_configs
from kvanta.options import parse_bytes
from kvanta.plan import plan
from kvanta.text_table import human_bytes, render_table

_DESCRIPTION = f"""\
How many tokens and users fit in a memory, per cache format: what the engine really allocates, padding included. No
weights are needed: MODEL may be a config.json, or the name of an example config:
{", ".join(example_configs())}.

  kvanta plan llama-3.1-8b --memory 24GiB --context 32768
  kvanta plan ./my-model/config.json
  kvanta plan smollm2 --memory 2GiB --formats bf16 int8 'k=int8,v=int4' --json plan.json"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta plan", description=_DESCRIPTION)
    add_model(result)
    result.add_argument(
        "--memory", metavar="SIZE", help="memory for weights and cache [8GiB, or what leaves the weights some room]"
    )
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
        f"{human_bytes(report['weight_bytes'])} of weights ({report['parameters'] / 1e9:.2f} billion, "
        f"{report['dtype']}), "
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
    memory = None if values.memory is None else parse_bytes(values.memory)
    report = plan(model_of(values), memory, formats, context, options)
    write_report(values.json, report, _text(report))
    return 0
