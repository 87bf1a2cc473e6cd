"""`kvanta serve`: an HTTP server that speaks OpenAI's API."""

from __future__ import annotations

import argparse
from typing import NoReturn

from kvanta.cli.arguments import (
    CommandParser,
    add_engine_options,
    add_foreign_options,
    add_model,
    add_options,
    engine_arguments,
    given_options,
    model_of,
)
from kvanta.engine_options import FOREIGN as ENGINE_FOREIGN
from kvanta.errors import InputError
from kvanta.server import check_packages
from kvanta.server.options import FOREIGN, OPPOSITES, OPTIONS, REFUSED, read_options

_DESCRIPTION = """\
An HTTP server that speaks OpenAI's API: continuous batching, a prefix cache and metrics on any cache format. The
command lines of vLLM, SGLang and Aphrodite work here: docs/serve.md lists every option and its other names.

  kvanta serve smollm2 --kv-cache-dtype int4
  kvanta serve ./my-model --host 0.0.0.0 --port 8000 --api-key SECRET --max-model-len 4096
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta serve", description=_DESCRIPTION)
    add_model(result)
    add_options(result.add_argument_group("server options"), OPTIONS, OPPOSITES)
    own = {name for option in OPTIONS for name in (option.name, *option.aliases)} | OPPOSITES.keys()
    add_engine_options(result, foreign=False)
    add_foreign_options(result, {name: kind for name, kind in ENGINE_FOREIGN.items() if name not in own})
    add_foreign_options(result, FOREIGN)
    for name in REFUSED:
        result.add_argument(f"--{name.replace('_', '-')}", nargs="*", action=_RefusedOption, help=argparse.SUPPRESS)
    return result


class _RefusedOption(argparse.Action):
    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise InputError(f"{self.option_strings[0]} is not built: {REFUSED[self.dest]}")


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    check_packages()
    model = model_of(values)
    options = read_options(given_options(values, OPTIONS))
    from kvanta.server.run import serve

    return serve(model, engine_arguments(values), options)
