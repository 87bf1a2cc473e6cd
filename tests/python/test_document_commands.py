"""Commands that documents name: each is run, or its options and values are checked, as tools/data/document_commands.txt
says.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from document_commands import HOW, LIST, ROOT, commands, current, read_list, render
from live_server import CHAT_TEMPLATE, live_server

from kvanta import _core
from kvanta.cli import ALIASES, COMMANDS, main
from kvanta.cli.arguments import CommandParser
from kvanta.cli.bench import SUBJECTS
from kvanta.errors import InputError
from kvanta.options.engine import EngineOptions
from kvanta.options.model import ModelOptions
from kvanta.options.option import parse_bytes
from kvanta.server.options import OPTIONS as SERVER_OPTIONS
from kvanta.server.options import read_options
from kvanta.server.run import load

CASES = [(document, command, how) for document, rows in read_list().items() for command, how in rows.items()]
STORIES = ROOT / "models/stories260k"
TEXT = "One day, a little girl named Lily found a needle in her room. She knew it was difficult to play with it. " * 40
MODELS = ("smollm2", "MODEL", "./model", "./model/config.json", "./my-model", "M", "FILE")
# Values in place of placeholders, for parsing.
PLACEHOLDERS = {"SIZE": "1GiB", "BITS": "5", "N": "2", "NAMES": "int8", "URL": "http://127.0.0.1:8000", "...": "int8"}
# Formats that save memory for heads of 8 channels, in place of those with blocks of 32, or with a calibration.
SMALLER = ((r"int4\b(?!_per)", "t4"), (r"int[356]_g32", "int8"), (r"nvfp4", "int4_per_token_head"), (r"\+query", ""))
# Less work than the documented command does, by command: options that replace those of the same name.
LESS: dict[str, dict[str, str]] = {
    "generate": {"--max-tokens": "4"},
    "eval": {"--tokens": "256", "--context": "128"},
    "calibrate": {"--tokens": "256"},
    "bench engine": {"--requests": "2", "--input-len": "8", "--output-len": "4"},
}
ENGINE = {"generate", "eval", "calibrate", "bench engine", "chat"}


def words_of(command: str) -> list[str]:
    """The words of the first simple command, without variables before it and & after it."""
    words = shlex.split(re.sub(r'^eval "\$\((.*)\)"', r"\1", command))
    while re.fullmatch(r"\w+=.*", words[0]):
        words = words[1:]
    return words[: words.index("&")] if "&" in words else words


def split_kvanta(words: list[str]) -> tuple[str, CommandParser, list[str]]:
    """Command, its parser and the words after it."""
    name = ALIASES.get(words[0], words[0])
    assert name in COMMANDS, words
    module, rest = name, words[1:]
    if name == "bench" and rest and rest[0] in SUBJECTS:
        name, module, rest = f"bench {rest[0]}", f"bench_{rest[0]}", rest[1:]
    parser = importlib.import_module(f"kvanta.cli.{module}").parser()
    assert isinstance(parser, CommandParser)
    return name, parser, rest


def filled(words: list[str]) -> list[str]:
    return [PLACEHOLDERS.get(word, word) for word in words]


def check_values(name: str, values: argparse.Namespace) -> None:
    """Values of options that the parser leaves to the command."""
    arguments = {key: value for key, value in vars(values).items() if value is not None}
    EngineOptions.read(arguments)
    ModelOptions.read(arguments)
    formats = [*(arguments.get("formats") or ()), *(arguments.get("search_formats") or ())]
    formats += [arguments["kv_cache_dtype"]] if "kv_cache_dtype" in arguments else []
    for text in formats:
        if text not in ("auto", "w4a16") and not text.endswith(".json"):
            _core.KvScheme.parse(text)
    if name == "serve":
        read_options({option.name: getattr(values, option.name) for option in SERVER_OPTIONS})
    for size in ("memory", "store_bytes"):
        if arguments.get(size) is not None:
            parse_bytes(arguments[size])


def check_kvanta(words: list[str], *, form: bool = False) -> None:
    """Its options exist and, unless it is a form, their values are valid."""
    if words[:2] == ["COMMAND", "--help"]:
        return
    name, parser, rest = split_kvanta(words)
    if form:
        unknown = [word for word in rest if word.startswith("--") and parser.action_of(word) is None]
        assert unknown in ([], ["--help"]), words
        return
    check_values(name, parser.parse_exactly(filled(rest)))


def check_program(words: list[str]) -> None:
    """A program of the repository: the file exists, and has the options."""
    index = 1 if re.search(r"python3?$", words[0]) else 0
    if words[index] == "-m":
        if words[index + 1].startswith("kvanta."):
            found = ROOT.joinpath("python", *words[index + 1].split("."))
            assert found.with_suffix(".py").exists() or (found / "__init__.py").exists(), words
        return
    file = ROOT / words[index]
    assert file.is_file(), f"{words[index]} does not exist"
    sources = [file]
    if words[index] == "scripts/demo":
        sources.append(ROOT / "python/kvanta/cli/demo.py")
    if file.parent.name == "benchmarks":  # some options are in a module that they share
        names = re.findall(r"^from (\w+) import", file.read_text(), re.MULTILINE)
        sources += [path for name in names if (path := file.parent / f"{name}.py").exists()]
    text = "".join(source.read_text() for source in sources)
    for word in words[index + 1 :]:
        flag = word.strip("[]").partition("=")[0]
        if flag.startswith("--"):
            known = any(f"{flag}{end}" in text for end in ('"', ")", "]", " ", "="))
            assert known or flag[2:].replace("-", "_") in EngineOptions.__dataclass_fields__, f"{words}: {flag}"


def check_build(words: list[str]) -> None:
    """Presets, targets, CMake options, extras of pip, files of docker."""
    text = " ".join(words)
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    names = {each["name"] for kind in ("configurePresets", "buildPresets", "testPresets") for each in presets[kind]}
    assert {*re.findall(r"--preset (\S+)", text)} <= names, text
    cmake = "".join(file.read_text() for file in [ROOT / "CMakeLists.txt", *ROOT.glob("cmake/*.cmake")])
    for option in re.findall(r"-D(KVANTA_\w+)", text):
        assert option in cmake, option
    project = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"(?:kvanta|\.|\.whl)\[([\w,]+)\]", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = ", project, re.MULTILINE), extra
    for version in re.findall(r"kvanta-([\d.]+)-cp", text):
        assert f"VERSION {version}" in cmake, f"{text}: another version"
    for file in re.findall(r"-f (\S+)|-S (\S+)", text):
        assert (ROOT / "".join(file)).exists(), text
    for place in re.findall(r"build/release/(\S+)", text):
        folder = place.removesuffix("_test")
        assert (ROOT / folder).is_dir() or (ROOT / f"{place}.cc").is_file(), place


def simple_commands(command: str) -> list[str]:
    return [part.strip() for part in command.split("&&")]


def check(command: str, *, form: bool = False) -> None:
    """Everything that can be looked up without running it."""
    for part in simple_commands(command):
        words = words_of(part)
        if words[0] == "kvanta":
            check_kvanta(words[1:], form=form)
        elif re.match(r"scripts/|tools/|benchmarks/|\S*python3?$", words[0]):
            check_program(words)
        else:
            check_build(words)


def on_the_included_model(name: str, words: list[str], folder: Path) -> list[str]:
    """The words with the included model, formats that it takes, files below `folder`, and less work."""
    less = LESS.get(name, {})
    kept = [word for before, word in itertools.pairwise(["", *filled(words)]) if not less.keys() & {before, word}]
    if name == "plan" and kept[0] not in MODELS:  # an example config
        return kept
    text = []
    for before, word in itertools.pairwise(["", *kept]):
        new = word
        if before in ("", "--model-path") and (word in MODELS or word.endswith(".gguf")):
            new = str(STORIES)
        elif word.startswith("/var/"):
            new = str(folder / "cache")
        elif before != "--weight-dtype":
            for pattern, instead in SMALLER:
                new = re.sub(pattern, instead, new)
        if new not in ("int8", "t4") or new not in text:
            text.append("512" if before == "--context" else new.replace("SMALL_MODEL", "stories260k"))
    if name == "eval" and "--formats" not in text:
        text += ["--formats", "int8", "t4"]
    if "--search" in text:  # with its scales, no format takes fewer bits in heads of 8 channels
        text = [word for word in text if not re.fullmatch(r"[\d.]+", word)]
        text.insert(text.index("--search") + 1, "9")
        text += ["--search-tokens", "64"]
        text += [] if "--search-formats" in text else ["--search-formats", "int8", "t4"]
    if name == "chat":
        text += ["--chat-template", "chat.jinja"]
    if name == "generate" and (len(text) == 1 or text[1].startswith("-")):
        text.insert(1, "Once")
    text += [word for pair in less.items() for word in pair]
    return text + (["--kv-cache-memory-bytes", "16MiB", "--threads", "1"] if name in ENGINE else [])


def run_kvanta(words: list[str], folder: Path) -> None:
    name, _, rest = split_kvanta(words)
    if name == "cache" and not Path("DIR").exists():
        assert main(["generate", "stories260k", TEXT[:1000], "--kv-cache-dir", "DIR", "--max-tokens", "2"]) == 0
    assert main([*name.split(), *on_the_included_model(name, rest, folder)]) == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name."""
    path = tmp_path_factory.mktemp("documents")
    for name in ("my.txt", "mine.txt", "FILE", "TEXT", "YOUR_TEXT"):
        (path / name).write_text(TEXT)
    for name in ("model", "my-model"):
        shutil.copytree(STORIES, path / name)
    (path / "chat.jinja").write_text(CHAT_TEMPLATE)
    return path


def test_the_list_is_current() -> None:
    assert LIST.read_text() == render(current()), "run tools/document_commands.py, and decide how new commands run"
    assert {how for _, _, how in CASES} <= HOW.keys()


def test_a_new_command_is_found() -> None:
    text = "Text\n\n    kvanta eval M --tokens 5   # why\n    kvanta plan \\\n        M\n\nand `kvanta\nformats`.\n"
    assert commands(text) == ["kvanta eval M --tokens 5", "kvanta plan M", "kvanta formats"]


@pytest.mark.parametrize(
    "command",
    [
        "kvanta eval M --tokens x",
        "kvanta plan --bogus",
        "kvanta generate M --dtype int3",
        "kvanta generate M x --kv-cache-dtype int9",
        "kvanta serve M --port 70000",
    ],
)
def test_a_wrong_command_fails(command: str) -> None:
    with pytest.raises(InputError):
        check(command)


@pytest.mark.parametrize(
    "command",
    [
        "scripts/tests --quick",
        "scripts/test --slow",
        "cmake --preset fast",
        "pip install '.[server]'",
        "benchmarks/soak.py M --hours 3",
        "kvanta frobnicate",
    ],
)
def test_a_wrong_program_fails(command: str) -> None:
    with pytest.raises(AssertionError):
        check(command)


@pytest.mark.parametrize("how", sorted(HOW.keys() - {"foreign", "post", "refused"}))
def test_options_and_values(how: str) -> None:
    for command in dict.fromkeys(command for _, command, each in CASES if each == how):
        check(command, form=how == "form")


def test_refused_ones() -> None:
    rows = [command for _, command, how in CASES if how == "refused"]
    assert rows
    for command in rows:
        with pytest.raises(InputError):
            check(command)


@pytest.mark.parametrize(("document", "command"), [case[:2] for case in CASES if case[2] == "run"])
def test_runs(document: str, command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("/exit\n"))
    words = words_of(command)
    assert words[0] == "kvanta"
    run_kvanta(words[1:], folder)


@pytest.mark.parametrize(("document", "command"), [case[:2] for case in CASES if case[2] == "server"])
def test_servers(document: str, command: str, tmp_path: Path) -> None:
    _, parser, rest = split_kvanta(words_of(command)[1:])
    values = parser.parse_exactly(on_the_included_model("serve", rest, tmp_path))
    options = read_options({option.name: getattr(values, option.name) for option in SERVER_OPTIONS})
    names = (*EngineOptions.__dataclass_fields__, *ModelOptions.__dataclass_fields__)
    given = {name: getattr(values, name) for name in names if getattr(values, name, None) is not None}
    loaded = load(
        "stories260k", {**given, "max_model_len": 512, "kv_cache_memory_bytes": "16MiB", "threads": 1}, options
    )
    assert loaded.engine.config.max_model_len == 512


def test_posts() -> None:
    rows = [command for _, command, how in CASES if how == "post"]
    assert len(rows) >= 4
    with live_server(options={}) as server:
        for command in dict.fromkeys(rows):
            words = shlex.split(command)
            (url,) = [word for word in words if word.startswith("localhost:8000/")]
            body = json.loads(words[words.index("-d") + 1])
            body["max_tokens"] = 4 if "messages" in body else None
            response = server.client.post(
                url.removeprefix("localhost:8000"), json={k: v for k, v in body.items() if v is not None}
            )
            assert response.status_code == 200, response.text
