"""Parsing the command line: one-line errors with exit status 2, and the engine's options from their one list."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from kvanta.cli.llama_cpp_options import advice
from kvanta.compat_options import IGNORED, LISTS, OPPOSITES, REFUSED, check_refused, flags_of, ignored_note
from kvanta.engine_options import OPTIONS
from kvanta.errors import InputError
from kvanta.model_options import OPTIONS as MODEL_OPTIONS
from kvanta.options import Option, flag_of
from kvanta.sampling_params import SamplingParams, flag_fields
from kvanta.text_table import human_bytes
from kvanta.values import nearest, one_line

_ARGUMENT = "\0"  # marks words like options after "--", which parse_known_intermixed_args would take for options


class CommandParser(argparse.ArgumentParser):
    """Raises InputError instead of printing its usage, and names the option that is nearest to an unknown one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        named.setdefault("allow_abbrev", False)
        named.setdefault("formatter_class", _Formatter)
        super().__init__(*arguments, **named)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for everything that it does not like."""
        raise InputError(f"{message} (see {self.prog} --help)")

    def parse_exactly(self, words: Sequence[str]) -> argparse.Namespace:
        """Like parse_args."""
        end = words.index("--") if "--" in words else len(words)
        spelled, model = self._spelled(words[:end]), None
        if "--config" in self._option_string_actions:
            from kvanta.cli.config_file import with_config

            spelled, model = with_config(self, spelled)
        self._check_flags(spelled)
        dashes = words[end : end + 1]
        arguments = [_ARGUMENT + word if word.startswith("-") else word for word in words[end + 1 :]]
        values, unknown = self.parse_known_intermixed_args([*self._join_values(spelled), *dashes, *arguments])
        self._unmark(values)
        if model is not None and values.MODEL is None and values.model_option is None:
            values.model_option = model
        options = [word for word in unknown if word.startswith("-") and word != "--"]
        if options:
            name = options[0].split("=")[0]
            self.error(f"unknown option {name}{self.nearest(name)}")
        extra = [word for word in unknown if word != "--"]
        if extra:
            hint = "; words after -- are arguments, not options" if extra[0].startswith(_ARGUMENT) else ""
            self.error(f"one argument too many: {extra[0].removeprefix(_ARGUMENT)!r}{hint}")
        given = {each.dest: getattr(values, each.dest) for each in self._actions if self._is_given_list(each, values)}
        values.given_lists = given
        return values

    def _check_flags(self, words: Sequence[str]) -> None:
        """Refuses llama.cpp's options with ours, and short flags that argparse would take for the beginning of others:
        -t for -tp, and -np for -n with the value p.
        """
        for index, word in enumerate(words):
            flag = word.partition("=")[0]
            if not re.match(r"--?[A-Za-z]", word) or " " in word or flag in self._option_string_actions:
                continue
            instead = advice(words, index, list(self._option_string_actions), self.prog)
            if instead:
                self.error(f"{flag} is llama.cpp's option: {instead}")
            has_number = flag[:2] in self._option_string_actions and flag[2:].isdigit()  # -n2
            if not flag.startswith("--") and not has_number:
                self.error(f"unknown option {flag}{self.nearest(flag)}")

    def _unmark(self, values: argparse.Namespace) -> None:
        for action in self._actions:
            value = getattr(values, action.dest, None)
            if not action.option_strings and isinstance(value, str):
                setattr(values, action.dest, value.removeprefix(_ARGUMENT))

    @staticmethod
    def _is_given_list(action: argparse.Action, values: argparse.Namespace) -> bool:
        value = getattr(values, action.dest, None)
        return bool(action.option_strings) and isinstance(value, list) and value is not action.default

    @property
    def actions(self) -> list[argparse.Action]:
        """Every option and argument."""
        return self._actions

    def nearest(self, flag: str) -> str:
        """The end of a message on an unknown flag."""
        return nearest(flag, [known for action in self._actions for known in action.option_strings])

    def action_of(self, word: str) -> argparse.Action | None:
        """The option that a word of the command line is, if it is one."""
        return self._option_string_actions.get(word.partition("=")[0])

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """The words with --max_model_len as --max-model-len, and --a-config.key VALUE as JSON for --a-config."""
        spelled: list[str] = []
        nested: dict[str, dict[str, Any]] = {}
        rest = iter(words)
        for word in rest:
            name, equals, value = word.partition("=")
            flag, dot, path = name.replace("_", "-").partition(".") if name.startswith("--") else (name, "", "")
            if flag not in self._option_string_actions or flag == name:
                spelled.append(word)
            elif not dot:
                spelled.append(flag + equals + value)
            else:
                path = name.partition(".")[2]
                put_nested(nested.setdefault(flag, {}), path.split("."), value if equals else next(rest, ""))
        for flag, entries in nested.items():
            given = spelled[spelled.index(flag) + 1] if flag in spelled[:-1] else "{}"
            try:
                spelled += [flag, json.dumps({**json.loads(given), **entries})]
            except (ValueError, TypeError):
                self.error(f"{flag} is {one_line(given)}, and {flag}.{next(iter(entries))} is given as well")
        return spelled

    def _join_values(self, words: Sequence[str]) -> list[str]:
        """--kv-cache-dtype-layers -1=bf16: argparse takes a value that begins with a dash for an option."""
        joined: list[str] = []
        for word in words:
            if joined and joined[-1] in _DASHED_VALUES and re.match(r"-\d", word):
                joined[-1] += f"={word}"
            else:
                joined.append(word)
        return joined


def put_nested(target: dict[str, Any], path: Sequence[str], value: str) -> None:
    """Sets target[path[0]][path[1]]... to a value of JSON, or else to the text."""
    for step in path[:-1]:
        inner = target.setdefault(step, {})
        if not isinstance(inner, dict):
            raise InputError(f"{step} of {'.'.join(path)} is given as {one_line(inner)}, too")
        target = inner
    try:
        target[path[-1]] = json.loads(value)
    except (ValueError, RecursionError):
        target[path[-1]] = value


_DASHED_VALUES = {
    flag
    for option in OPTIONS
    if option.name in ("kv_cache_dtype_layers", "kv_cache_dtype_skip_layers")
    for flag in option.flags
}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class ListOption(argparse.Action):
    """Values that replace the default; where the option is repeated, those of all places together."""

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*values] if before is self.default else [*before, *values])


class _IgnoredOption(argparse.Action):
    """Prints its line once."""

    def __call__(self, *_: object, **__: object) -> None:
        print(f"kvanta: {ignored_note(self.dest.removeprefix('ignored_'))}", file=sys.stderr)


class _RefusedOption(argparse.Action):
    """Accepts values that ask for nothing, as LLM does."""

    def __call__(self, _: object, __: object, values: Any, option_string: str | None = None) -> None:
        value = values if isinstance(values, str) else values[0] if len(values) == 1 else values or True
        check_refused(self.dest.removeprefix("refused_"), value)


class _NeutralOption(argparse.Action):
    """An option of loading, for a command without them: its default is accepted."""

    def __call__(self, _: object, __: object, value: Any, option_string: str | None = None) -> None:
        name = self.dest.removeprefix("neutral_")
        (option,) = (each for each in MODEL_OPTIONS if each.name == name)
        if option.is_flag or option.read(value) != option.read(option.default):
            raise InputError(
                f"{name} is an option of kvanta serve, kvanta generate, kvanta chat and LLM, not of this command"
            )


class _NoOption(argparse.Action):
    """--no-X of an ignored or refused switch."""

    def __call__(self, *_: object, **__: object) -> None:
        pass


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, or --model / --model-path as the known servers have it."""
    parser.add_argument("MODEL", nargs="?", help="folder in Hugging Face layout, .gguf file, stories260k or smollm2")
    parser.add_argument("--model", "--model-path", dest="model_option", metavar="MODEL", help=argparse.SUPPRESS)


def model_of(values: argparse.Namespace) -> str:
    """Moves a misplaced positional along: with --model, the first positional is what follows MODEL."""
    if values.model_option is None and values.MODEL is None:
        before = swallowed(values, "MODEL")
        raise InputError(f"MODEL is missing: {before}give a folder, a .gguf file, stories260k or smollm2")
    if values.model_option is not None and values.MODEL is not None:
        if getattr(values, "PROMPT", ...) is not None:
            raise InputError(f"MODEL is given twice: {values.MODEL!r} and --model {values.model_option!r}")
        values.PROMPT = values.MODEL
    return str(values.MODEL if values.model_option is None else values.model_option)


def swallowed(values: argparse.Namespace, argument: str) -> str:
    """The list option that probably took an argument for one of its values, as the beginning of what to do."""
    for name, given in values.given_lists.items():
        if len(given) > 1:
            return f"{flag_of(name)} took {' and '.join(map(repr, given))}; put {argument} before it, or "
    return ""


def add_engine_options(parser: argparse.ArgumentParser, *, own: Sequence[str] = (), loads: bool = False) -> None:
    """Adds every engine option, and those of other engines except the command's `own` names.

    `loads`: the command has the options of loading, too; else they are accepted when they ask for nothing.
    """
    add_options(parser.add_argument_group("engine options"), OPTIONS, OPPOSITES)
    if loads:
        add_options(parser.add_argument_group("model options"), MODEL_OPTIONS, {})
    else:
        for option in MODEL_OPTIONS:
            parser.add_argument(
                *option.flags, dest=f"neutral_{option.name}", action=_NeutralOption, nargs="?", help=argparse.SUPPRESS
            )
    for name, takes_value in IGNORED.items():
        if name in own:
            continue
        text = "accepted; no code of a model is ever run" if name == "trust_remote_code" else argparse.SUPPRESS
        nargs = "+" if name in LISTS else None if takes_value else 0
        parser.add_argument(*flags_of(name), dest=f"ignored_{name}", action=_IgnoredOption, nargs=nargs, help=text)
    refused = [name for name in REFUSED if name not in own]
    for name in refused:
        nargs = None if REFUSED[name].takes_one_value else "*"
        parser.add_argument(
            *flags_of(name), dest=f"refused_{name}", action=_RefusedOption, nargs=nargs, help=argparse.SUPPRESS
        )
    for name in (*(name for name, takes_value in IGNORED.items() if not takes_value and name not in own), *refused):
        parser.add_argument(flag_of(f"no_{name}"), action=_NoOption, nargs=0, help=argparse.SUPPRESS)


def _shown_default(option: Option) -> str:
    """A default as a user would write it: 16GiB for a size in bytes."""
    if option.metavar == "SIZE" and isinstance(option.default, int):
        return human_bytes(option.default).replace(".0 ", "")
    return str(option.default)


def add_options(group: Any, options: Sequence[Option], opposites: Mapping[str, str]) -> None:
    """Adds a list of options, their aliases, and names for the opposite of some."""
    for option in options:
        text = option.help.replace("%", "%%")
        if option.is_flag:
            action: Any = argparse.BooleanOptionalAction if option.default else "store_true"
            for index, flag in enumerate(option.flags):
                shown = argparse.SUPPRESS if index else text
                group.add_argument(flag, dest=option.name, action=action, default=None, help=shown)
                if not option.default:
                    no = f"--no-{flag.removeprefix('--')}"
                    group.add_argument(no, dest=option.name, action="store_false", default=None, help=argparse.SUPPRESS)
            continue
        if any(choice not in text for choice in option.choices):
            text += f": {', '.join(option.choices)}"
        text += f" [{_shown_default(option)}]" if option.default not in ("", 0, ()) and not option.is_list else ""
        many: Any = {"nargs": "+", "action": ListOption} if option.is_list else {}
        group.add_argument(*option.flags, dest=option.name, metavar=option.metavar, help=text, **many)
    for name, opposite in opposites.items():
        for flag, action in ((flag_of(name), "store_false"), (flag_of(f"no_{name}"), "store_true")):
            group.add_argument(flag, dest=opposite, action=action, default=None, help=argparse.SUPPRESS)


def given_options(values: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    """The options of the list that were given, by name."""
    given = {option.name: getattr(values, option.name) for option in options}
    return {name: value for name, value in given.items() if value is not None}


def formats_of(values: argparse.Namespace, kv_cache_dtype: str | None) -> Sequence[str] | None:
    """The formats that a command compares: --formats, or the one of --kv-cache-dtype; None: neither was given."""
    formats: Sequence[str] | None = values.formats
    if kv_cache_dtype is None:
        return formats
    if formats:
        raise InputError("--formats and --kv-cache-dtype both say which formats are compared; give one of them")
    return [kv_cache_dtype]


def engine_arguments(values: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, as arguments for LLM; with them those of loading, if the command has them."""
    loading = [option for option in MODEL_OPTIONS if hasattr(values, option.name)]
    return given_options(values, [*OPTIONS, *loading])


def add_sampling_fields(group: Any, defaults: Mapping[str, Any]) -> None:
    """Adds a flag for every field of SamplingParams that has a help text. `defaults`: in place of the fields' own, for
    the help.
    """
    hints = get_type_hints(SamplingParams)
    for field in flag_fields():
        default = defaults.get(field.name, field.default)
        kinds = {bool: "flag", int: whole_number, float: real_number}
        (kind,) = {kinds[each] for each in _types_in(hints[field.name]) if each in kinds} or {str}
        if kind == "flag":
            group.add_argument(flag_of(field.name), action="store_true", default=None, help=field.metadata["help"])
            continue
        several = Sequence in {get_origin(each) for each in get_args(hints[field.name])}
        many: Any = {"nargs": "+", "action": ListOption} if several else {}
        text = field.metadata["help"] + ("" if default is None else f" [{default:g}]")
        group.add_argument(
            flag_of(field.name),
            type=kind,
            default=None,
            metavar=field.metadata["metavar"],
            help=text,
            **many,
        )


def sampling_arguments(values: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given, as arguments of SamplingParams."""
    given = {field.name: getattr(values, field.name) for field in flag_fields()}
    return {name: value for name, value in given.items() if value is not None}


def _types_in(hint: Any) -> set[Any]:
    """The types that a type hint names: int, None for Sequence[int] | None."""
    parts = get_args(hint)
    return {hint} if not parts else set().union(*map(_types_in, parts))


def whole_number(text: str) -> int:
    """For `type=` of options."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def real_number(text: str) -> float:
    """For `type=` of options."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
