"""`--config FILE`: options of a command from a YAML or JSON file, as in vLLM and SGLang."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvanta.cli.arguments import CommandParser
from kvanta.errors import InputError, reason_of
from kvanta.options.option import flag_of
from kvanta.params.checks import one_line

_MODEL_NAMES = ("model", "model_path", "model_tag")


def add_config(parser: CommandParser) -> None:
    """Adds the option, for --help, and reads its file before other options."""
    parser.read_config = with_config
    parser.add_argument(
        "--config", metavar="FILE", help="YAML or JSON file with options, which the command line overrides"
    )


def with_config(parser: CommandParser, words: Sequence[str]) -> tuple[list[str], str | None]:
    """The words, then the file's options that the words do not set; and the file's model."""
    files = [value for word, value in itertools.pairwise([*words, ""]) if word == "--config"]
    files += [word.partition("=")[2] for word in words if word.startswith("--config=")]
    if not files:
        return list(words), None
    if len(files) > 1:
        raise InputError(f"--config is given {len(files)} times")
    if not files[0]:
        raise InputError("--config needs a file")
    given = {action.dest for word in words if (action := parser.action_of(word)) is not None}
    added, model = option_words(parser, read_config(Path(files[0]).expanduser()), f"--config {files[0]}", given)
    return [*words, *added], model


def option_words(
    parser: CommandParser, options: Mapping[str, Any], where: str, given: Collection[str] = ()
) -> tuple[list[str], str | None]:
    """The options as words of the command line, without `given` ones, and the model. `where`: for errors."""
    added: list[str] = []
    model = None
    for key, value in options.items():
        name = str(key).lstrip("-").replace("-", "_")
        if name in _MODEL_NAMES:
            model = str(value)
            continue
        flag = flag_of(name)
        action = parser.action_of(flag)
        if action is None:
            raise InputError(f"{where}: unknown option {name}{parser.nearest(flag)}")
        if value is not None and action.dest not in given:
            added += _words(parser, flag, value, takes_value=action.nargs != 0)
    return added, model


def _words(parser: CommandParser, flag: str, value: Any, *, takes_value: bool) -> Iterator[str]:
    if isinstance(value, bool) and not takes_value:
        no = f"--no-{flag.removeprefix('--')}"
        if value:
            yield flag
        elif parser.action_of(no) is not None:
            yield no
    elif isinstance(value, Mapping):
        yield f"{flag}={json.dumps(value)}"
    elif isinstance(value, list):
        if any(isinstance(each, (Mapping, list)) for each in value):
            yield f"{flag}={json.dumps(value)}"
        elif value:
            yield from (flag, *map(str, value))
    else:
        yield f"{flag}={value}"


def read_config(file: Path, option: str = "--config") -> Mapping[str, Any]:
    """The content of a file, which must be a mapping. `option`: that names it, for errors. Raises InputError."""
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix.lower() == ".json" else _yaml(text, option)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{option} {file}: {reason_of(error)}") from None
    if not isinstance(content, Mapping):
        raise InputError(f"{option} {file} must hold options by name, got {one_line(content)}")
    return content


def _yaml(text: str, option: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError(f"{option} with a YAML file needs the package PyYAML; a .json file needs nothing") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
