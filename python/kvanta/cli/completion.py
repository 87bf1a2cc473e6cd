"""`kvanta completion SHELL`: a script that completes commands and their options."""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Mapping

from kvanta.cli import ALIASES, COMMANDS
from kvanta.cli.arguments import CommandParser

_DESCRIPTION = """\
Prints a script that completes commands, options and file names. For the shell that is running:

  source <(kvanta completion bash)        source <(kvanta completion zsh)        kvanta completion fish | source"""

_BASH = """\
_kvanta() {{
  local words="" current="${{COMP_WORDS[COMP_CWORD]}}"
  if [[ $COMP_CWORD -eq 1 ]]; then
    words={commands}
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [[ $current == -* ]] || words=""
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _kvanta kvanta
"""


def parser() -> CommandParser:
    """The command's options."""
    result = CommandParser(prog="kvanta completion", description=_DESCRIPTION)
    result.add_argument("SHELL", choices=["bash", "zsh", "fish"], help="shell that reads the script")
    return result


def _options() -> Mapping[str, Mapping[str, str]]:
    """Command -> option -> its line in --help."""
    listed: dict[str, dict[str, str]] = {}
    for name in [*COMMANDS, *ALIASES]:
        module = importlib.import_module(f"kvanta.cli.{ALIASES.get(name, name)}")
        actions = [action for action in module.parser().actions if action.help != argparse.SUPPRESS]
        listed[name] = {flag: action.help or "" for action in actions for flag in action.option_strings}
    return listed


def _bash(options: Mapping[str, Mapping[str, str]]) -> str:
    cases = (f"      {name}) words={shlex.quote(' '.join(flags))} ;;" for name, flags in options.items())
    return _BASH.format(commands=shlex.quote(" ".join(options)), cases="\n".join(cases))


def _fish(options: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for name, flags in options.items():
        text = COMMANDS.get(name) or f"the same as {ALIASES[name]}"
        lines.append(f"complete -c kvanta -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}")
        for flag, described in flags.items():
            kind = "-l" if flag.startswith("--") else "-s"
            line = shlex.quote(" ".join(described.replace("%%", "%").split()))
            lines.append(
                f"complete -c kvanta -n '__fish_seen_subcommand_from {name}' {kind} {flag.lstrip('-')} -d {line}"
            )
    return "\n".join(lines) + "\n"


def run(values: argparse.Namespace) -> int:
    """Runs the command."""
    options = _options()
    if values.SHELL == "fish":
        print(_fish(options), end="")
        return 0
    if values.SHELL == "zsh":
        print("autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit")
    print(_bash(options), end="")
    return 0
