"""Options declared once: a dataclass field carries the default, help, conversion, aliases and flags of an option."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Self, TypeVar

from kvanta.errors import InputError
from kvanta.params.checks import one_line, truth
from kvanta.terminal.tables import human_bytes

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_MAX_BYTES = 2**62

# Group -> its line in the help of commands, in the order in which help lists them. --help=GROUP shows one.
GROUPS: Mapping[str, str] = {
    "server": "address, names and paths of the server",
    "parsers": "tool calls and reasoning in the model's text",
    "sampling": "how tokens are chosen, and where a text ends",
    "model": "weights, tokenizer, chat template and downloads",
    "cache": "format and size of the KV cache",
    "batching": "sequences: how many at once, and how long",
    "prefix": "cached prefixes, in memory, on disk and on other machines",
    "speculation": "speculative decoding",
    "structured": "JSON and other constrained texts",
    "device": "CPU or GPU, threads, instruction set",
    "parallel": "several processes, machines and replicas",
    "access": "keys, hosts, web pages, HTTPS",
    "limits": "limits of requests and connections",
    "logging": "log and metrics",
}
# Commands whose --help shows an option; others show it with --help=GROUP.
GENERATING = ("generate", "chat", "serve")
EVERYWHERE = (*GENERATING, "eval", "plan", "calibrate", "bench engine")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Option:
    """One option, as read from its field of an OptionGroup."""

    name: str
    """Argument of LLM and attribute of the group; the flag is --name with dashes."""
    help: str
    default: Any
    convert: Callable[[Any], Any]
    group: str
    """A key of GROUPS."""
    shown: tuple[str, ...] = ()
    """Commands whose --help shows the option even without its group."""
    aliases: tuple[str, ...] = ()
    """Further names, as arguments and as flags."""
    choices: tuple[str, ...] = ()
    config_field: str = ""
    """Field of the C++ EngineConfig, where its name differs."""
    is_list: bool = False
    metavar: str = "X"
    short_flag: str = ""

    @property
    def is_flag(self) -> bool:
        """True for a switch, which takes no value on the command line."""
        return isinstance(self.default, bool)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)

    @property
    def flags(self) -> list[str]:
        """Command-line flags, the preferred one first."""
        return [*map(flag_of, self.names), *filter(None, [self.short_flag])]

    def default_text(self, default: Any = None) -> str:
        """A default as a user would write it: 16GiB for a size in bytes. Empty: the help says what it means.

        `default`: in place of the option's own.
        """
        value = self.default if default is None else default
        if self.is_list:
            return " ".join(value)
        if self.is_flag or value in ("", 0):
            return ""
        return human_bytes(value).replace(".0 ", "") if self.metavar == "SIZE" else str(value)

    def read(self, value: Any) -> Any:
        """The converted value. Raises InputError that names the option."""
        if self.is_flag:
            return truth(self.name, value)
        try:
            converted = self.convert(value)
        except InputError as error:
            raise InputError(f"{self.name}: {error}", self.name) from None
        except TypeError:
            raise InputError(f"{self.name} must be {self.metavar}, got {one_line(value)}", self.name) from None
        if self.choices and converted not in self.choices:
            raise InputError(f"{self.name} must be one of {', '.join(self.choices)}, got {value!r}", self.name)
        return converted


def option(
    default: Any,
    help: str,  # noqa: A002
    convert: Callable[[Any], Any] = str,
    *,
    group: str,
    **details: Any,
) -> Any:
    """A dataclass field that declares an Option; `details` are Option's remaining fields."""
    return field(default=default, metadata={"option": {"help": help, "convert": convert, "group": group, **details}})


@dataclass
class OptionGroup:
    """Base class of dataclasses whose fields are made by `option`."""

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Every option of the group, in order."""
        return tuple(
            Option(name=each.name, default=each.default, **each.metadata["option"]) for each in dataclasses.fields(cls)
        )

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Checked and converted values; an option that is absent or None has its default."""
        values = {}
        for each in cls.options():
            value = given.get(each.name)
            values[each.name] = each.read(each.default if value is None else value)
        return cls(**values)


def accepts_options(group: type[OptionGroup]) -> Callable[[Function], Function]:
    """Decorator: lists the group's options in the signature of a function that takes them as **keywords."""

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        rest = [each for each in signature.parameters.values() if each.kind is inspect.Parameter.VAR_KEYWORD]
        listed = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in dataclasses.fields(group)
        ]
        function.__dict__["__signature__"] = signature.replace(parameters=[*own, *listed, *rest])
        return function

    return decorate


def flag_of(name: str) -> str:
    """The command-line flag of an argument."""
    return f"--{name.replace('_', '-')}"


def parse_bytes(value: str | int | float) -> int:
    """Bytes from "2GiB", "512 MB" or a plain number."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{value!r} is not a size in bytes; examples: 2GiB, 512MiB, 1000000")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size >= _MAX_BYTES:
        raise InputError(f"{value!r} exceeds the largest size, 4 EiB")
    return size


def split_list(value: str | int | Iterable[str | int]) -> list[str]:
    """Entries of "0,1,sliding_window", ["0", "1"] or [0, 1], separated by commas, spaces or both."""
    if isinstance(value, (str, int)):
        value = [value]
    return [entry for part in value for entry in str(part).replace(",", " ").split()]


def parse_integer(value: Any) -> int:
    """An integer, or its decimal text."""
    if isinstance(value, bool) or not re.fullmatch(r"[+-]?[0-9]+", str(value)):
        raise InputError(f"{value!r} is not a whole number")
    return int(value)


def parse_tokens(value: Any) -> int:
    """A number of tokens: "32k" is 32,000 and "32K" is 32,768, as in vLLM; so for m and M."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kKmM])", str(value))
    if match is None:
        return parse_integer(value)
    return int(Decimal(match[1]) * {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}[match[2]])


def json_text(value: Any) -> str:
    """The text of an object in JSON, given as such or as a mapping; empty for None and an empty one."""
    if isinstance(value, Mapping):
        try:
            return json.dumps(dict(value)) if value else ""
        except (TypeError, ValueError):
            raise InputError(f"{one_line(value)} is not JSON") from None
    if not isinstance(value, str):
        raise InputError(f"{one_line(value)} is neither a mapping nor its JSON")
    return "" if value.strip().lower() in ("{}", "null", "none") else value


def parse_number(value: Any) -> float:
    """A number, or its decimal text."""
    try:
        return float(value)
    except ValueError:
        raise InputError(f"{value!r} is not a number") from None
