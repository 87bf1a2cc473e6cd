"""`kvanta completion`: completions in bash, and that the scripts of other shells name the same options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import kvanta

from kvanta.cli import ALIASES, COMMANDS
from kvanta.cli.bench import SUBJECTS
from kvanta.cli.completion import SHELLS, command_tree

_COMPLETE = """\
offered() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  _shtab_kvanta kvanta "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[@]}"
}
"""


@pytest.fixture(scope="module")
def script() -> str:
    return kvanta("completion", "bash").stdout


def offered(script: str, *words: str) -> list[str]:
    """Completions of the last word in bash."""
    done = subprocess.run(
        ["bash", "-c", script + _COMPLETE + 'offered "$@"', "bash", "kvanta", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ser"], ["serve"]),
        (["run", "--served"], ["--served-model-name", "--served-model-names"]),
        (["serve", "m", "--kv-cache-dtype", "int8"], ["int8", "int8_per_token_head", "int8_g32"]),
        (["generate", "m", "--dtype", ""], ["auto", "bfloat16", "float16", "float32"]),
        (["serve", "m", "--tool-call-parser", "her"], ["hermes"]),
        (["eval", "m", "--formats", "fp8", "kivi"], ["kivi4", "kivi3", "kivi2"]),
        (["eval", "m", "--tasks", "kl", "nee"], ["needle"]),
        (["bench", ""], [*SUBJECTS]),
        (["bench", "serve", "--inp"], ["--input-len"]),
        (["bench", "attention", "--shapes", "de"], ["decode", "decode-1k"]),
        (["cache", ""], ["ls", "verify", "clear", "show"]),
        (["generate", "m", "--data-par"], []),  # another engine's
        (["generate", "m", "--help"], ["--help", "--help-all"]),
    ],
)
def test_bash_offers(script: str, words: list[str], expected: list[str]) -> None:
    assert sorted(offered(script, *words)) == sorted(expected)


def test_bash_offers_files_and_folders(script: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "folder").mkdir()
    start = str(tmp_path / "")
    both = [str(tmp_path / "folder"), str(tmp_path / "model.gguf")]
    assert sorted(offered(script, "generate", f"{start}/")) == both
    assert sorted(offered(script, "calibrate", "m", "--text", f"{start}/")) == both
    assert offered(script, "serve", "m", "--kv-cache-dir", f"{start}/") == both[:1]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_commands_and_values(shell: str) -> None:
    text = kvanta("completion", shell).stdout
    for name in (*COMMANDS, *ALIASES, "int5_g32", "shapes" if shell != "tcsh" else "bench"):
        assert name in text
    if (program := shutil.which(shell)) and shell != "powershell":
        assert subprocess.run([program, "-n", "-c", text], capture_output=True, check=False).returncode == 0


def test_the_tree_has_every_command() -> None:
    (commands,) = (action for action in command_tree()._actions if action.nargs == "A...")
    assert [*(commands.choices or ())] == [*COMMANDS, *ALIASES]
