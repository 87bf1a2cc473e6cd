"""Fields of parameter classes: a dataclass field carries the check of its values, and its help for commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line, whole_number

INT32_MAX = 2**31 - 1

Check = Callable[[str, Any], Any]
"""check(name, value) -> the value to be stored; raises InputError that names the field."""


def parameter(
    default: Any,
    check: Check,
    *,
    help: str = "",  # noqa: A002
    metavar: str = "X",
    common: bool = False,
    http: bool = True,
    accepted: str = "",
    refused: str = "",
    **own: Any,
) -> Any:
    """`common`: commands show the flag even without its group. `http`: the HTTP endpoints have the field
    under this name and with this type. `accepted`, `refused`: the reason, if the field has no effect. `own`: for
    dataclasses.field.
    """
    metadata = {
        "check": check,
        "help": help,
        "metavar": metavar,
        "common": common,
        "http": http,
        "accepted": accepted,
        "refused": refused,
    }
    return dataclasses.field(default=default, metadata=metadata, **own)


def without_effect(default: Any, check: Check, reason: str, **own: Any) -> Any:
    """A field that means nothing here."""
    return parameter(default, check, accepted=reason, repr=False, **own)


def unsupported(*neutral: Any, use: str) -> Any:
    """A field of vLLM that is refused. Only its default, the first of `neutral`, and equal requests pass.

    `use`: the reason, or what exists instead.
    """

    def check(name: str, value: Any) -> Any:
        plain = getattr(value, "value", value)  # of an enum
        if plain is not None and not any(type(plain) is type(each) and plain == each for each in neutral):
            raise InputError(f"{name} is not supported, got {one_line(value)}: {use}")
        return neutral[0]

    return parameter(neutral[0], check, refused=use, repr=False)


def optional(check: Check) -> Check:
    """The check of a field that may be None."""
    return lambda name, value: None if value is None else check(name, value)


def check_truncation(name: str, value: Any) -> int:
    """Number of a prompt's tokens that are kept; -1: as many as fit."""
    return whole_number(name, value, -1 if value == -1 else 1, INT32_MAX, ", -1 or None")


def check_side(name: str, value: Any) -> str:
    """The side of a prompt that is cut off."""
    if value not in ("left", "right"):
        raise InputError(f"{name} must be left or right, got {one_line(value)}")
    return str(value)


def check_output_kind(name: str, value: Any) -> int:
    """A member of vLLM's RequestOutputKind, or its number."""
    return whole_number(name, getattr(value, "value", value), 0, 2)


class Parameters:
    """Base class of such dataclasses: checks types and ranges; numpy's numbers become Python's."""

    def __post_init__(self) -> None:
        """Raises InputError that names the field."""
        values, name = self.__dict__, ""
        try:
            for name, default, check in _checks(type(self)):
                value = values[name]
                if value is not default:
                    values[name] = check(name, value)
        except InputError as error:
            error.field = name
            raise


_cached_checks: dict[type[Parameters], list[tuple[str, Any, Check]]] = {}


def _checks(kind: type[Any]) -> list[tuple[str, Any, Check]]:
    """Name, default and check of each field; most values are the default, which needs none."""
    if kind not in _cached_checks:
        _cached_checks[kind] = [(each.name, each.default, each.metadata["check"]) for each in dataclasses.fields(kind)]
    return _cached_checks[kind]
