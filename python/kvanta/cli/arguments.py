"""Parsing the command line: one-line errors with exit status 2, and the engine's options from their one list."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from kvanta.cli.help_page import ALL, Section, ShowHelp, help_page, less_common, sections
from kvanta.errors import InputError
from kvanta.options.ages import OPTIONS as LEVEL_OPTIONS
from kvanta.options.ages import with_ages
from kvanta.options.engine import OPTIONS
from kvanta.options.foreign import OPPOSITES
from kvanta.options.foreign_flags import ForeignOption, add_foreign_options, add_neutral_options
from kvanta.options.llama_cpp import advice, rewritten
from kvanta.options.model import OPTIONS as MODEL_OPTIONS
from kvanta.options.option import GROUPS, Option, flag_of
from kvanta.params.checks import nearest, one_line
from kvanta.params.sampling_params import SamplingParams, flag_fields

_ARGUMENT = "\0"  # marks words like options after "--", which parse_known_intermixed_args would take for options


class CommandParser(argparse.ArgumentParser):
    """Raises InputError instead of printing its usage, and names the option that is nearest to an unknown one."""

    def __init__(self, prog: str, description: str) -> None:
        """`description`: paragraphs, and indented lines, which are not filled."""
        super().__init__(prog=prog, description=description, allow_abbrev=False, add_help=False)
        self._positionals.title = "arguments"
        self._about = dict(GROUPS)
        self.takes_llama_server_options = False
        """Options of llama.cpp's server mean ours where these have the same meaning."""
        self.read_config: Callable[[CommandParser, Sequence[str]], tuple[list[str], str | None]] | None = None
        """Adds the options of a file to words; returns them, and the file's model."""
        self.add_argument("-h", "--help", action=ShowHelp, dest="common", help="the options that people use")
        self.add_argument("--help-all", action=ShowHelp, dest=ALL, help="every option")

    def group(self, name: str, about: str = "") -> argparse._ArgumentGroup:
        """The options under a heading, which --help=NAME shows alone. `about`: what they are about."""
        if about:
            self._about[name] = about
        found = [each for each in self._action_groups if each.title == name]
        return found[0] if found else self.add_argument_group(name)

    def help_text(self, group: str = "") -> str:
        """The page of a group, of ALL options or, by default, of those that people use."""
        groups = self._action_groups
        known = [*(section.name for section in sections(groups)), ALL]
        if group and group not in known:
            self.error(f"--help={group}: unknown group{nearest(group, known)}; groups: {', '.join(known)}")
        return help_page(self.prog, self.description or "", groups, group, self._about)

    def format_help(self) -> str:
        """Every option."""
        return self.help_text(ALL)

    def reference(self) -> list[Section]:
        """Every option in the order of the help, for documents."""
        return sections(self._action_groups)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for everything that it does not like."""
        raise InputError(f"{message} (see {self.prog} --help)")

    def parse_exactly(self, words: Sequence[str]) -> argparse.Namespace:
        """Like parse_args."""
        if self.takes_llama_server_options:
            words = self._rewritten(words)
        end = words.index("--") if "--" in words else len(words)
        for word in words[:end]:
            if word.startswith("--help="):
                print(self.help_text(word.partition("=")[2]), end="")
                self.exit()
        spelled, model = self._spelled(words[:end]), None
        if self.read_config is not None:
            spelled, model = self.read_config(self, spelled)
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

    def _rewritten(self, words: Sequence[str]) -> list[str]:
        """The words with llama-server's options as ours; a line says which have been left out."""
        end = words.index("--") if "--" in words else len(words)
        found, left_out = rewritten(words[:end], self._option_string_actions)
        if left_out:
            print(f"kvanta: {', '.join(left_out)}: there is nothing to choose here, and no effect", file=sys.stderr)
        return [*found, *words[end:]]

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

    def with_flag(self, error: InputError) -> str:
        """The message, with the flag in place of the name of the option that it begins with."""
        message, flag = str(error), flag_of(error.field or "")
        if not error.field or flag not in self._option_string_actions:
            return message
        return re.sub(rf"^{re.escape(error.field)}\b", flag, message)

    def nearest(self, flag: str) -> str:
        """The end of a message on an unknown flag: it offers the command's own options."""
        own = [action for action in self._actions if not isinstance(action, ForeignOption)]
        return nearest(flag, [known for action in own for known in action.option_strings])

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


class ListOption(argparse.Action):
    """Values that replace the default; where the option is repeated, those of all places together."""

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*values] if before is self.default else [*before, *values])


_MODEL_HELP = """\
a Hugging Face id (ORGANIZATION/MODEL; its *.safetensors are downloaded once), a folder in that layout, a .gguf file (of
several, any), stories260k or smollm2"""


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL, or --model / --model-path as the known servers have it."""
    parser.add_argument("MODEL", nargs="?", help=_MODEL_HELP)
    parser.add_argument("--model", "--model-path", dest="model_option", metavar="MODEL", help=argparse.SUPPRESS)


def model_of(values: argparse.Namespace) -> str:
    """Moves a misplaced positional along: with --model, the first positional is what follows MODEL."""
    if values.model_option is None and values.MODEL is None:
        before = swallowed(values, "MODEL")
        raise InputError(
            f"MODEL is missing: {before}give a Hugging Face id, a folder, a .gguf file, stories260k or smollm2"
        )
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


def add_engine_options(
    parser: CommandParser, *, own: Sequence[str] = (), loads: bool = False, defaults: Mapping[str, Any] | None = None
) -> None:
    """Adds every engine option, and those of other engines except the command's `own` names.

    `loads`: the command has the options of loading, too; else only values without effect are accepted. `defaults`:
    the command's, in place of the options' own, for the help.
    """
    add_options(parser, OPTIONS, OPPOSITES, defaults)
    if loads:
        add_options(parser, MODEL_OPTIONS, {})
    else:
        add_neutral_options(parser)
    add_foreign_options(parser, own)


def add_options(
    parser: CommandParser,
    options: Sequence[Option],
    opposites: Mapping[str, str],
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Adds a list of options to their groups, their aliases, and names for the opposite of some."""
    command = parser.prog.partition(" ")[2]
    for option in options:
        group = parser.group(option.group)
        mark = (lambda action: action) if command in option.shown else less_common
        text = option.help.replace("%", "%%")
        if option.is_flag:
            action: Any = argparse.BooleanOptionalAction if option.default else "store_true"
            for index, flag in enumerate(option.flags):
                shown = argparse.SUPPRESS if index else text
                mark(group.add_argument(flag, dest=option.name, action=action, default=None, help=shown))
                if not option.default:
                    no = f"--no-{flag.removeprefix('--')}"
                    group.add_argument(no, dest=option.name, action="store_false", default=None, help=argparse.SUPPRESS)
            continue
        if any(choice not in text for choice in option.choices):
            text += f": {', '.join(option.choices)}"
        default = option.default_text((defaults or {}).get(option.name))
        text += f" [{default}]" if default else ""
        many: Any = {"nargs": "+", "action": ListOption} if option.is_list else {}
        mark(group.add_argument(*option.flags, dest=option.name, metavar=option.metavar, help=text, **many))
    for name, opposite in opposites.items():
        for flag, action in ((flag_of(name), "store_false"), (flag_of(f"no_{name}"), "store_true")):
            parser.add_argument(flag, dest=opposite, action=action, default=None, help=argparse.SUPPRESS)


def given_options(values: argparse.Namespace, options: Sequence[Option]) -> dict[str, Any]:
    """The options of the list that were given, by name."""
    given = {option.name: getattr(values, option.name) for option in options}
    return {name: value for name, value in given.items() if value is not None}


def formats_of(values: argparse.Namespace, engine: dict[str, Any]) -> Sequence[str] | None:
    """The formats that a command compares: --formats, or the one of --kv-cache-dtype, -ages and -floor.

    None: none of them was given. `engine`: the options of the engine, of which it takes the latter two out.
    """
    formats: Sequence[str] | None = values.formats
    given = with_ages({name: engine.pop(name, None) for name in LEVEL_OPTIONS})
    kv_cache_dtype = given["kv_cache_dtype"]
    if kv_cache_dtype is None:
        return formats
    if formats:
        raise InputError("--formats and --kv-cache-dtype both say which formats are compared; give one of them")
    return [kv_cache_dtype]


def engine_arguments(values: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given, as arguments for LLM; with them those of loading, if the command has them."""
    loading = [option for option in MODEL_OPTIONS if hasattr(values, option.name)]
    return given_options(values, [*OPTIONS, *loading])


def add_sampling_fields(parser: CommandParser, defaults: Mapping[str, Any]) -> None:
    """Adds a flag for every field of SamplingParams that has a help text. `defaults`: in place of the fields' own, for
    the help.
    """
    group = parser.group("sampling")
    hints = get_type_hints(SamplingParams)
    for field in flag_fields():
        default = defaults.get(field.name, field.default)
        kinds: dict[Any, Any] = {bool: "flag", int: whole_number, float: real_number}
        (kind,) = {kinds[each] for each in _types_in(hints[field.name]) if each in kinds} or {str}
        mark = (lambda action: action) if field.metadata["common"] else less_common
        if kind == "flag":
            mark(
                group.add_argument(flag_of(field.name), action="store_true", default=None, help=field.metadata["help"])
            )
            continue
        several = Sequence in {get_origin(each) for each in get_args(hints[field.name])}
        many: Any = {"nargs": "+", "action": ListOption} if several else {}
        text = field.metadata["help"] + ("" if default is None else f" [{default:g}]")
        metavar = field.metadata["metavar"]
        mark(group.add_argument(flag_of(field.name), type=kind, default=None, metavar=metavar, help=text, **many))


def sampling_arguments(values: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given, as arguments of SamplingParams."""
    given = {field.name: getattr(values, field.name) for field in flag_fields()}
    return {name: value for name, value in given.items() if value is not None}


def _types_in(hint: Any) -> set[Any]:
    """The types that a type hint names: int, None for Sequence[int] | None."""
    parts = get_args(hint)
    return {hint} if not parts else set().union(*map(_types_in, parts))


def whole_number(text: str) -> int:
    """Parses an option's value, for `type=`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def real_number(text: str) -> float:
    """Parses an option's value, for `type=`."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
