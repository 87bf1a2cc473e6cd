"""The command kvanta. Exit status: 0 done, 2 bad input, 1 failure; errors are one line on stderr."""

from __future__ import annotations

import errno
import importlib
import io
import os
import resource
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

# Command -> its line in --help. Each is the module of its name here, with parser() and run().
COMMANDS = {
    "generate": "text from a model, streamed, on any cache format",
    "chat": "a conversation with a model, in the terminal",
    "serve": "an HTTP server that speaks OpenAI's API",
    "show": "what a model's files are, and what the engine does with them",
    "eval": "what each cache format does to a model's predictions",
    "plan": "how many tokens and users fit in a memory, per cache format",
    "calibrate": "static scales and key means of a model, from a text",
    "formats": "the table of cache formats",
    "cache": "what a folder of cached prefixes holds: ls, verify, clear, show",
    "convert": "a GGUF file to a folder in Hugging Face layout",
    "bench": "speed of the attention kernels, and of a server under load",
    "completion": "a script for the shell, which completes commands, options and their values",
}
ALIASES = {"run": "serve"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvanta COMMAND ...",
            "",
            "LLM inference on a quantized KV cache.",
            "",
            *lines,
            "",
            "kvanta COMMAND --help lists the options that people use, --help-all every one.",
            "First look, without a network: kvanta generate stories260k 'Once upon a time'",
        ]
    )


def _run(words: Sequence[str]) -> int:
    from kvanta.errors import InputError
    from kvanta.params.checks import nearest

    if len(words) > 1 and words[0] == "help":
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        from kvanta import __version__

        print(f"kvanta {__version__}")
        return 0
    name = ALIASES.get(words[0], words[0])
    if name not in COMMANDS:
        what = "option" if words[0].startswith("-") else "command"
        raise InputError(f"unknown {what} {words[0]!r}{nearest(words[0], COMMANDS)}; commands: {', '.join(COMMANDS)}")
    command = importlib.import_module(f"kvanta.cli.{name}")
    parser = command.parser()
    try:
        return int(command.run(parser.parse_exactly(words[1:])))
    except InputError as error:
        raise InputError(parser.with_flag(error)) from None


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"kvanta: {message}", file=sys.stderr)


def report_errors(command: Callable[[], int]) -> int:
    """Runs `command` and turns what it raises into one line on stderr and an exit status."""
    from kvanta.errors import InputError, KvantaError, reason_of

    warnings.showwarning = _show_warning
    for name in ("stdout", "stderr"):  # None where the shell has closed it
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write what the terminal's encoding does not have
        sys.stdout.reconfigure(errors="replace")
    try:
        status = command()
        sys.stdout.flush()
    except KvantaError as error:
        print(f"kvanta: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("\nkvanta: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            print(f"kvanta: error: too many open files: the limit is {limit} (ulimit -n)", file=sys.stderr)
            return 1
        if error.errno not in _FULL:
            return _report_fault(error)
        print(f"kvanta: error: the output cannot be written: {reason_of(error)}", file=sys.stderr)
        return 1
    except MemoryError:
        from kvanta.terminal.memory_limits import memory_note

        print(f"kvanta: error: there is not enough memory{memory_note()}", file=sys.stderr)
        return 1
    except Exception as error:  # a defect of Kvanta, but still one line
        return _report_fault(error)
    return status


def _report_fault(error: Exception) -> int:
    if os.environ.get("KVANTA_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    text = f"internal error: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    print(f"kvanta: error: {text} (please report it; KVANTA_DEBUG=1 shows the traceback)", file=sys.stderr)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; `arguments` default to the process's own. Returns the exit status."""
    return report_errors(lambda: _run(sys.argv[1:] if arguments is None else arguments))
