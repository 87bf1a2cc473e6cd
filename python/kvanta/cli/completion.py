"""`kvanta completion SHELL`: a script that completes commands, their options, and the values of options."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence

from kvanta import formats
from kvanta.cli import ALIASES, COMMANDS
from kvanta.cli.arguments import CommandParser
from kvanta.cli.bench import SUBJECTS
from kvanta.options import engine as engine_options
from kvanta.options import model as model_options
from kvanta.parsers.reasoning import FORMATS
from kvanta.parsers.tool_calls import PARSERS
from kvanta.server import options as server_options

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
_DESCRIPTION = """\
Prints a script that completes commands, options, their values and file names. For the shell that is running:

  eval "$(kvanta completion bash)"       eval "$(kvanta completion zsh)"       kvanta completion fish | source"""

_OPTIONS = (*engine_options.OPTIONS, *model_options.OPTIONS, *server_options.OPTIONS)
_VALUES: Mapping[str, Sequence[str]] = {
    **{option.name: option.choices for option in _OPTIONS if option.choices},
    "tool_call_parser": tuple(PARSERS),
    "reasoning_parser": tuple(FORMATS),
}


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta completion", description=_DESCRIPTION)
    result.add_argument("SHELL", choices=SHELLS, help=f"shell that reads the script: {', '.join(SHELLS)}")
    return result


def _parsers() -> Iterator[tuple[str, str, CommandParser]]:
    """Name, help and parser of each command."""
    for name, text in COMMANDS.items():
        yield name, text, importlib.import_module(f"kvanta.cli.{name}").parser()
    for name, target in ALIASES.items():
        yield name, f"the same as {target}", importlib.import_module(f"kvanta.cli.{target}").parser()


def command_tree() -> argparse.ArgumentParser:
    """One parser of all commands, whose options have the values that shells complete."""
    tree = argparse.ArgumentParser(prog="kvanta", add_help=False)
    tree.add_argument("-h", "--help", action="store_true", help="list the commands")
    tree.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = tree.add_subparsers()
    for name, text, command in _parsers():
        if name != "bench":
            _add(commands, name, text, command)
            continue
        subjects = commands.add_parser(name, help=text, add_help=False).add_subparsers()
        for subject, subtext in SUBJECTS.items():
            _add(subjects, subject, subtext, importlib.import_module(f"kvanta.cli.bench_{subject}").parser())
    return tree


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, of: CommandParser
) -> None:
    import shtab

    places = {
        **dict.fromkeys(("MODEL", "FILE", "PATH", "TRACE"), shtab.FILE),
        **dict.fromkeys(("DIR", "FOLDER"), shtab.DIRECTORY),
    }
    names = [name for row in formats.table() for name in (row["name"], *row["aliases"])]
    for action in of.actions:
        kind = str(action.metavar or action.dest)
        if action.dest in _VALUES:
            action.choices = _VALUES[action.dest]
        elif kind == "FORMAT" and action.dest != "load_format":
            action.choices = names
        elif kind in places:
            action.complete = places[kind]  # type: ignore[attr-defined]
    commands.add_parser(name, help=text, parents=[of], add_help=False)


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    import shtab

    print(shtab.complete(command_tree(), values.SHELL))
    return 0
