"""`kvanta bench SUBJECT`: one list of what can be measured; each subject has its own module."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from kvanta.cli.arguments import CommandParser

# Subject -> its line in --help. Each is the module bench_SUBJECT here, with parser() and run().
SUBJECTS = {
    "attention": "speed of the attention kernels, as a share of the machine's limit",
    "engine": "the engine under load, without HTTP: throughput, latencies, cost of a step outside the model",
    "linear": "speed of linear layers per weight type, as shares of the machine's limits",
    "recurrent": "speed of the layers with a state of hybrids, as shares of the machine's limits",
    "serve": "an OpenAI-compatible server under load: latencies, throughput, goodput",
}

_DESCRIPTION = "\n".join(
    [
        "Measures one part of Kvanta, or a server.",
        "",
        *(f"  {name:<10} {text}" for name, text in SUBJECTS.items()),
        "",
        "kvanta bench SUBJECT --help lists the options of a subject.",
    ]
)


class _BenchParser(CommandParser):
    """The first word chooses the parser of the others."""

    def parse_exactly(self, words: Sequence[str]) -> argparse.Namespace:
        """Like CommandParser's; `subject` of the result is the module that runs it."""
        if words and words[0] in SUBJECTS:
            module = importlib.import_module(f"kvanta.cli.bench_{words[0]}")
            values: argparse.Namespace = module.parser().parse_exactly(words[1:])
            values.subject = module
            return values
        return super().parse_exactly(words[:1])  # --help, or what is wrong with the subject


def parser() -> CommandParser:
    """The command's options."""
    result = _BenchParser(prog="kvanta bench", description=_DESCRIPTION)
    result.add_argument("SUBJECT", choices=list(SUBJECTS), help="what to measure; its options follow")
    return result


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    return int(values.subject.run(values))
