"""Names of commands and options: help, other names of `kvanta serve`, completion in shells."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_line import kvanta

from kvanta import __version__


def test_version_and_help() -> None:
    assert kvanta("--version").stdout == f"kvanta {__version__}\n"
    for words in ([], ["--help"]):
        done = kvanta(*words)
        assert done.returncode == 0
        for command in ("generate", "chat", "serve", "eval", "plan", "calibrate", "formats", "convert", "bench"):
            assert command in done.stdout


@pytest.mark.parametrize(
    "command", ["generate", "chat", "serve", "eval", "plan", "calibrate", "formats", "convert", "bench"]
)
def test_every_command_has_help(command: str) -> None:
    done = kvanta(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"kvanta {command}" in done.stdout


def test_help_of_a_command_lists_choices() -> None:
    done = kvanta("help", "generate")
    assert done.stdout == kvanta("generate", "--help").stdout
    for choices in ("auto, bfloat16, float16, float32 [auto]", "auto, cpu, cuda [auto]"):
        assert choices in done.stdout


@pytest.mark.parametrize(
    "words", [["kvanta", "run"], ["kvanta.launch_server"], ["kvanta.entrypoints.openai.api_server"]]
)
def test_other_names_of_serve(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *words, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout == kvanta("serve", "--help").stdout


def test_completion_in_bash() -> None:
    script = kvanta("completion", "bash").stdout
    script += 'complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvanta; echo "${COMPREPLY[@]}"; }\n'
    script += "complete_words kvanta ser; complete_words kvanta run --served\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["serve", "--served-model-name --served-model-names"]
    assert "bashcompinit" in kvanta("completion", "zsh").stdout
    assert "__fish_seen_subcommand_from chat' -l system" in kvanta("completion", "fish").stdout
