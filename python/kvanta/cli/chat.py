"""`kvanta chat`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse

from kvanta.cli.arguments import (
    CommandParser,
    add_engine_options,
    add_model,
    add_sampling_fields,
    engine_arguments,
    model_of,
    sampling_arguments,
)
from kvanta.cli.help_page import less_common
from kvanta.llm import LLM
from kvanta.params.sampling_params import SamplingParams
from kvanta.parsers.reasoning import FORMATS, format_name
from kvanta.terminal.chat.conversation import Conversation
from kvanta.terminal.chat.session import ChatSession

# Unless the model's generation_config.json or an option says otherwise. max_tokens: what the context holds.
_DEFAULTS = {"max_tokens": None, "temperature": 0.7}
_ENGINE_DEFAULTS = {"max_num_seqs": 1}

_DESCRIPTION = """\
A conversation with a model in the terminal; /help lists its commands. In a pipe, each line is a message.

  kvanta chat smollm2 --kv-cache-dtype int4 --system 'You are brief.'
  printf 'Hello\\nAnd in French?\\n' | kvanta chat smollm2"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta chat", description=_DESCRIPTION)
    add_model(result)
    result.add_argument("--system", metavar="TEXT", help="system message")
    result.add_argument("--plain", action="store_true", help="show Markdown unformatted")
    result.add_argument(
        "--reasoning-parser",
        default="",
        metavar="NAME",
        help=f"format of the model's reasoning: {', '.join(FORMATS)} (default: by the marks in its vocabulary)",
    )
    add_sampling_fields(result, _DEFAULTS)
    less_common(
        result.group("model").add_argument(
            "--tokenizer", metavar="MODEL", help="model whose tokenizer and chat template are used instead"
        )
    )
    less_common(
        result.group("model").add_argument(
            "--chat-template", metavar="FILE", help="file with a Jinja2 template in place of the model's own"
        )
    )
    add_engine_options(result, own=("reasoning_parser", "chat_template"), loads=True, defaults=_ENGINE_DEFAULTS)
    return result


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    model = model_of(values)
    given = sampling_arguments(values)
    SamplingParams(**given)
    reasoning = format_name(values.reasoning_parser)
    arguments = {**_ENGINE_DEFAULTS, **engine_arguments(values)}
    llm = LLM(model, tokenizer=values.tokenizer, chat_template=values.chat_template, **arguments)
    sampling = {**_DEFAULTS, **llm.default_sampling, **given}
    conversation = Conversation(llm, sampling, system=values.system, reasoning_parser=reasoning)
    return ChatSession(conversation, plain=values.plain).run()
