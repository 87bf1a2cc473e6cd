"""`kvanta serve`: an HTTP server that speaks OpenAI's API."""

from __future__ import annotations

import argparse

from kvanta.cli.arguments import (
    CommandParser,
    add_engine_options,
    add_model,
    add_options,
    engine_arguments,
    given_options,
    model_of,
)
from kvanta.cli.config_file import add_config
from kvanta.cli.models_file import read_models
from kvanta.server import check_packages
from kvanta.server.options import OPPOSITES, OPTIONS, read_options

_DESCRIPTION = """\
An HTTP server that speaks OpenAI's API: continuous batching, a prefix cache and metrics on any cache format. The
command lines of vLLM, SGLang and Aphrodite work here: docs/flags.md lists their options.

  kvanta serve smollm2 --kv-cache-dtype int4
  kvanta serve ./my-model --host 0.0.0.0 --port 8000 --api-key SECRET --max-model-len 4096
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta serve", description=_DESCRIPTION)
    result.takes_llama_server_options = True
    add_model(result)
    add_config(result)
    add_options(result, OPTIONS, OPPOSITES)
    add_engine_options(result, own=[*(name for option in OPTIONS for name in option.names), *OPPOSITES], loads=True)
    return result


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    check_packages()
    options = read_options(given_options(values, OPTIONS))
    if options.models:
        file = read_models(parser(), values, options)
        from kvanta.server.models.run import serve_models

        return serve_models(file.entries, file.default, file.common, file.options)
    model = model_of(values)
    from kvanta.server.run import serve

    return serve(model, engine_arguments(values), options)
