"""Pages of --help: what people use, one group, everything; and the declarations from which they are made."""

from __future__ import annotations

import importlib
import re

import pytest
from command_line import kvanta

from kvanta import InputError
from kvanta.cli import bench_engine, chat, eval, generate, plan, serve  # noqa: A004
from kvanta.options import engine as engine_options
from kvanta.options import model as model_options
from kvanta.options.option import GROUPS, Option
from kvanta.server import options as server_options

OPTIONS: tuple[Option, ...] = (*engine_options.OPTIONS, *model_options.OPTIONS, *server_options.OPTIONS)
PARSERS = {
    module.__name__.rpartition(".")[2]: module.parser for module in (bench_engine, chat, eval, generate, plan, serve)
}


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def flags(text: str) -> set[str]:
    """The options that have their own line."""
    return set(re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_help_shows_what_people_use(command: str) -> None:
    parser = PARSERS[command]()
    short, everything = flags(parser.help_text()), flags(parser.help_text("all"))
    assert len(short) <= 18
    assert short < everything
    assert {"--kv-cache-dtype", "--kv-cache-memory-bytes", "--max-model-len", "--weight-dtype", "--threads"} <= short
    assert not short & {"--role", "--kv-store", "--nnodes", "--pooler-config", "--kv-events-config"}
    expected = {"serve": {"--port", "--api-key", "--max-num-seqs"}}.get(command, {"--temperature", "--seed"})
    assert expected <= short


@pytest.mark.parametrize("command", [*PARSERS])
def test_groups_together_show_everything(command: str) -> None:
    parser = PARSERS[command]()
    everything = parser.help_text("all")
    assert everything == parser.format_help()
    names = [section.name for section in parser.reference()]
    assert set(names) >= {"cache", "device", "sampling"}
    found = [flags(parser.help_text(name)) for name in names]
    assert set().union(*found) == flags(everything)
    assert sum(map(len, found)) == len(flags(everything)), "an option is in two groups"
    counts = re.findall(r"^  ([a-z]+) +([0-9]+)   ", parser.help_text(), re.MULTILINE)
    hidden = len(flags(everything)) - len(flags(parser.help_text()))
    assert sum(int(count) for _, count in counts) == hidden
    assert {name for name, _ in counts} <= {*names}


def test_every_option_is_declared_with_a_group_and_commands() -> None:
    for option in OPTIONS:
        assert option.group in GROUPS, option.name
        assert option.help, option.name
        assert option.is_flag or option.metavar != "X", option.name
        assert {each.replace(" ", "_") for each in option.shown} <= {*PARSERS, "calibrate"}, option.name
    assert {option.group for option in OPTIONS} == GROUPS.keys()


def test_reference_has_every_declared_option() -> None:
    for command, options in (("serve", OPTIONS), ("generate", (*engine_options.OPTIONS, *model_options.OPTIONS))):
        listed = {
            flag: section.name
            for section in PARSERS[command]().reference()
            for action in section.actions
            for flag in action.option_strings
        }
        for option in options:
            assert listed[option.flags[0]] == option.group, option.name


def test_defaults_are_those_of_the_command() -> None:
    def line(command: str) -> str:
        return " ".join(PARSERS[command]().help_text("batching").split())

    assert "that run at once [64]" in line("serve")
    for command in ("generate", "chat"):
        assert "that run at once [1]" in line(command)
    assert "[256]" in generate.parser().help_text("sampling")  # of max_tokens
    assert "[16GiB]" in serve.parser().help_text("prefix")


def test_choices_and_aliases_are_listed() -> None:
    parser = generate.parser()
    assert "auto, bfloat16, float16, float32 [auto]" in " ".join(parser.help_text("model").split())
    assert "auto, cpu, cuda [auto]" in parser.help_text("device")
    assert "--max-model-len, --context-length N" in parser.help_text("batching")
    assert "--context-length" not in parser.help_text()


def test_unknown_groups_are_errors() -> None:
    with pytest.raises(
        InputError, match=r"--help=cach: unknown group; did you mean cache\?; groups: .*cache, batching"
    ):
        generate.parser().parse_exactly(["--help=cach"])
    values = generate.parser().parse_exactly(["MODEL", "--", "--help=cache"])
    assert values.PROMPT == "--help=cache"


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", ["generate", "serve", "eval", "plan"])
def test_pages_fit_the_terminal(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for group in ("", "all"):
        lines = PARSERS[command]().help_text(group).splitlines()
        too_long = [line for line in lines if len(line) > columns and not re.match(r"  +(kvanta|curl|-d) ", line)]
        assert not too_long


def test_help_of_a_command_by_its_name() -> None:
    done = kvanta("help", "generate", COLUMNS="100")
    assert done.stdout == kvanta("generate", "--help", COLUMNS="100").stdout == generate.parser().help_text()
    assert kvanta("serve", "--help-all", COLUMNS="100").stdout == serve.parser().help_text("all")
    assert kvanta("serve", "--help=cache", COLUMNS="100").stdout == serve.parser().help_text("cache")
    assert kvanta("help", "bench", "engine").stdout.startswith("usage: kvanta bench engine MODEL ")


@pytest.mark.parametrize("command", ["generate", "plan", "formats", "cache", "calibrate"])
def test_usage_names_the_arguments(command: str) -> None:
    text = importlib.import_module(f"kvanta.cli.{command}").parser().help_text()
    expected = {"generate": "MODEL [PROMPT] ", "plan": "MODEL ", "cache": "ACTION PATH ", "calibrate": "MODEL "}
    assert text.startswith(f"usage: kvanta {command} {expected.get(command, '')}[option ...]\n")
