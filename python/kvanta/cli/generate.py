"""`kvanta generate`: text from a model, streamed to the terminal."""

from __future__ import annotations

import argparse
import sys

from kvanta.cli.arguments import (
    CommandParser,
    add_engine_options,
    add_model,
    add_sampling_fields,
    engine_arguments,
    model_of,
    sampling_arguments,
    swallowed,
)
from kvanta.cli.help_page import less_common
from kvanta.cli.report import add_json, write_json_file, write_report
from kvanta.errors import InputError
from kvanta.llm import LLM
from kvanta.outputs import RequestOutput
from kvanta.params.sampling_params import SamplingParams
from kvanta.terminal.chat.generation_report import GenerationMeter, closing_line
from kvanta.terminal.chat.markdown import write_answer
from kvanta.text.prompts import TokenPrompt, read_prompt

# Defaults that differ from those of SamplingParams; the model's own count only if --generation-config is given.
_DEFAULTS = {"max_tokens": 256, "temperature": 0.0}
_ENGINE_DEFAULTS = {"max_num_seqs": 1}

_DESCRIPTION = """\
Text from a model, streamed. The text goes to the standard output, everything else to stderr.

  kvanta generate smollm2 "What is a KV cache?" --kv-cache-dtype int4
  kvanta generate stories260k "Once upon a time"
  kvanta generate ./my-model --raw < prompt.txt"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta generate", description=_DESCRIPTION)
    add_model(result)
    result.add_argument("PROMPT", nargs="?", help="the prompt; from the standard input when absent")
    style = result.add_mutually_exclusive_group()
    style.add_argument(
        "--chat", action="store_true", help="ask through the chat template (default when the model has one)"
    )
    style.add_argument("--raw", action="store_true", help="continue the prompt without a chat template")
    result.add_argument("--system", metavar="TEXT", help="system message of the chat")
    add_sampling_fields(result, _DEFAULTS)
    less_common(
        result.group("model").add_argument(
            "--tokenizer", metavar="MODEL", help="model whose tokenizer and chat template are used instead"
        )
    )
    add_json(result)
    add_engine_options(result, loads=True, defaults=_ENGINE_DEFAULTS)
    return result


def _read_prompt(values: argparse.Namespace) -> str:
    if values.PROMPT is not None:
        return str(values.PROMPT)
    if sys.stdin.isatty():
        print(f"kvanta: {swallowed(values, 'PROMPT')}type the prompt, then Ctrl-D", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"the standard input is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None


def _make_prompt(llm: LLM, text: str, values: argparse.Namespace) -> TokenPrompt:
    chat = values.chat or (llm.tokenizer.chat_template is not None and not values.raw)
    if not chat:
        if values.system is not None:
            raise InputError("--system needs a chat; this is a plain prompt")
        return read_prompt(text, llm.tokenizer)
    messages = [{"role": "user", "content": text}]
    if values.system is not None:
        messages.insert(0, {"role": "system", "content": values.system})
    return llm.chat_prompt(messages)


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    model = model_of(values)
    given = sampling_arguments(values)
    params = SamplingParams(**{**_DEFAULTS, **given})
    arguments = {**_ENGINE_DEFAULTS, "tokenizer": values.tokenizer, **engine_arguments(values)}
    text = _read_prompt(values)
    if not text:
        before = "" if values.PROMPT is not None else swallowed(values, "PROMPT")
        raise InputError(f"the prompt is empty: {before}give a text as PROMPT or on the standard input")
    llm = LLM(model, **arguments)
    if values.generation_config is not None or values.override_generation_config is not None:
        params = SamplingParams(**{**_DEFAULTS, **llm.default_sampling, **given})
    prompt = _make_prompt(llm, text, values)

    to_terminal = values.json != "-"
    meter = GenerationMeter(llm)
    output: RequestOutput | None = None
    for piece, output in llm.stream(prompt, params):
        if to_terminal:
            write_answer(piece)
        meter.update(output)
    assert output is not None, "a request ended without an output"
    report = meter.report(output)
    if not to_terminal:
        write_report("-", report, "")
        return 0
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(closing_line(report), file=sys.stderr)
    if values.json is not None:
        write_json_file(values.json, report)
    return 0
