"""Flags of other engines' options: accepted with a line that says so, or refused with the reason."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvanta.errors import InputError
from kvanta.options.foreign import IGNORED, LISTS, REFUSED, check_refused, flags_of, ignored_note
from kvanta.options.model import OPTIONS as MODEL_OPTIONS
from kvanta.options.option import flag_of


class ForeignOption(argparse.Action):
    """Base class: options that are not offered for a misspelt one."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """Does nothing: --no-X of an ignored or refused switch."""


class _IgnoredOption(ForeignOption):
    """Prints its line once."""

    def __call__(self, *_: Any, **__: Any) -> None:
        print(f"kvanta: {ignored_note(self.dest.removeprefix('ignored_'))}", file=sys.stderr)


class _RefusedOption(ForeignOption):
    """Accepts values without effect, as LLM does."""

    def __call__(self, _: Any, __: Any, values: Any, option_string: str | None = None) -> None:
        value = values if isinstance(values, str) else values[0] if len(values) == 1 else values or True
        check_refused(self.dest.removeprefix("refused_"), value)


class _NeutralOption(ForeignOption):
    """An option of loading, for a command without them: its default is accepted."""

    def __call__(self, _: Any, __: Any, values: Any, option_string: str | None = None) -> None:
        name = self.dest.removeprefix("neutral_")
        (option,) = (each for each in MODEL_OPTIONS if each.name == name)
        if option.is_flag or option.read(values) != option.read(option.default):
            raise InputError(
                f"{name} is an option of kvanta serve, kvanta generate, kvanta chat and LLM, not of this command"
            )


def add_neutral_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of loading to a command that has none: only values without effect are accepted."""
    for option in MODEL_OPTIONS:
        parser.add_argument(
            *option.flags, dest=f"neutral_{option.name}", action=_NeutralOption, nargs="?", help=argparse.SUPPRESS
        )


def add_foreign_options(parser: argparse.ArgumentParser, own: Sequence[str]) -> None:
    """Adds the options of other engines, except the names in `own`."""
    for name, takes_value in IGNORED.items():
        if name in own:
            continue
        nargs = "+" if name in LISTS else None if takes_value else 0
        parser.add_argument(
            *flags_of(name), dest=f"ignored_{name}", action=_IgnoredOption, nargs=nargs, help=argparse.SUPPRESS
        )
    refused = [name for name in REFUSED if name not in own]
    for name in refused:
        nargs = None if REFUSED[name].takes_one_value else "*"
        parser.add_argument(
            *flags_of(name), dest=f"refused_{name}", action=_RefusedOption, nargs=nargs, help=argparse.SUPPRESS
        )
    for name in (*(name for name, takes_value in IGNORED.items() if not takes_value and name not in own), *refused):
        parser.add_argument(flag_of(f"no_{name}"), action=ForeignOption, nargs=0, help=argparse.SUPPRESS)
