"""Precision by age (docs/ages.md): kv_cache_ages is another way to give a kv_cache_dtype that is a map of ages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line

_FIRST_AGE = re.compile(r"\s*\d+\s*=")


def with_ages(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with kv_cache_ages, if they have it, as kv_cache_dtype."""
    ages = arguments.get("kv_cache_ages")
    if not ages:
        return arguments
    if arguments.get("kv_cache_dtype") not in (None, "auto"):
        raise InputError(
            f"kv_cache_ages is {one_line(ages)} and kv_cache_dtype {one_line(arguments['kv_cache_dtype'])}: "
            "give one of them"
        )
    if not _FIRST_AGE.match(str(ages)):
        raise InputError(f"kv_cache_ages must be like 0=int8,8192=int4, got {one_line(ages)}")
    return {**arguments, "kv_cache_dtype": str(ages), "kv_cache_ages": None}
