"""Options of vLLM, SGLang and Aphrodite: accepted without effect, refused with a reason, or opposites of Kvanta's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvanta.errors import InputError
from kvanta.options import engine as engine_options
from kvanta.options import model as model_options
from kvanta.options.ignored import IGNORED_GROUPS, LISTS_OF_VALUES
from kvanta.options.option import flag_of
from kvanta.options.refused import REFUSED_GROUPS, REFUSED_LISTS_OF_VALUES, SHORT_FLAGS
from kvanta.params.checks import nearest, one_line, truth


class Refusal(NamedTuple):
    """Reason for refusing an option. `neutral` values have no effect and are accepted, as None, False, empty."""

    reason: str
    neutral: tuple[str, ...] = ()
    takes_one_value: bool = False
    """True if the flag takes one value; others are switches or take several."""


# Accepted without effect, with one line that says so. True: the flag takes a value; those of LISTS take several.
IGNORED: Mapping[str, bool] = {
    name: names is group.values
    for group in IGNORED_GROUPS
    for names in (group.switches, group.values)
    for name in names.split()
}
LISTS = frozenset(LISTS_OF_VALUES.split())
_IGNORED_REASONS: Mapping[str, str] = {
    name: group.reason for group in IGNORED_GROUPS for name in f"{group.switches} {group.values}".split()
}
_REFUSED_LISTS = frozenset(REFUSED_LISTS_OF_VALUES.split())
# Options that would change the results and are not supported.
REFUSED: Mapping[str, Refusal] = {
    name: Refusal(group.reason, group.neutral, names is group.values and name not in _REFUSED_LISTS)
    for group in REFUSED_GROUPS
    for names in (group.switches, group.values)
    for name in names.split()
}
OPPOSITES: Mapping[str, str] = {"disable_radix_cache": "enable_prefix_caching"}


class Meaning(NamedTuple):
    """Fate of an option of another engine."""

    kind: str
    """"honoured", "accepted", "refused" or "unknown"."""
    reason: str


def meaning(name: str, ours: Iterable[str]) -> Meaning:
    """Fate of an option, by its name with underscores. `ours`: names of options that have an effect."""
    if name in ours or name in OPPOSITES:
        return Meaning("honoured", "")
    if name in IGNORED:
        return Meaning("accepted", _IGNORED_REASONS[name])
    if name in REFUSED:
        return Meaning("refused", REFUSED[name].reason)
    return Meaning("unknown", "")


def ignored_note(name: str) -> str:
    """The line for an option of IGNORED."""
    return f"{name} is accepted and does nothing here: {_IGNORED_REASONS[name]}"


def check_refused(name: str, value: Any) -> None:
    """Raises InputError unless the value of an option of REFUSED has no effect. `value` may be a flag's text."""
    refusal = REFUSED[name]
    given = value.lower() if isinstance(value, str) else value
    if given and given not in (*refusal.neutral, "none", "null", "false", "{}", "[]"):
        raise InputError(f"{name} is not supported, got {one_line(value)}: {refusal.reason}")


def known_arguments(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options of the engine and of loading under their preferred names, and notes on options without effect.

    Raises InputError for an option that is unknown, refused or given twice. None means the default.
    """
    options = {name: each for each in (*engine_options.OPTIONS, *model_options.OPTIONS) for name in each.names}
    arguments: dict[str, Any] = {}
    notes = []
    for name, value in values.items():
        if name in options:
            target, setting = options[name].name, value
        elif name in OPPOSITES:
            target, setting = OPPOSITES[name], None if value is None else not truth(name, value)
        elif name in REFUSED:
            check_refused(name, value)
            continue
        elif name in IGNORED:
            notes += [] if value is None else [ignored_note(name)]
            continue
        else:
            raise InputError(f"unknown engine option {name!r}{nearest(name, options)}")
        if setting is None:
            continue
        if target in arguments:
            raise InputError(f"the engine option {target!r} is given twice: {arguments[target]!r} and {value!r}")
        arguments[target] = setting
    return arguments, notes


def flags_of(name: str) -> list[str]:
    """Command-line flags of an option of IGNORED or REFUSED."""
    return [flag_of(name), *([SHORT_FLAGS[name]] if name in SHORT_FLAGS else [])]
