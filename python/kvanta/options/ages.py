"""Later levels of pages: kv_cache_ages and kv_cache_floor are other ways to give a kv_cache_dtype that has them.

docs/ages.md, docs/pressure.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line

_FIRST_AGE = re.compile(r"\s*\d+\s*=")
_NEXT_LEVEL = re.compile(r"\s*,\s*(?![kv]\s*=)")
"""A comma between levels, which is not that of k=int4,v=t3."""
OPTIONS = ("kv_cache_dtype", "kv_cache_ages", "kv_cache_floor")


def with_ages(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with kv_cache_ages or kv_cache_floor, if they have one of them, in kv_cache_dtype."""
    dtype, ages, floor = (arguments.get(name) for name in OPTIONS)
    if not ages and not floor:
        return arguments
    if ages:
        for name, value in (("kv_cache_dtype", dtype), ("kv_cache_floor", floor)):
            if value not in (None, "", "auto"):
                raise InputError(f"kv_cache_ages is {one_line(ages)} and {name} {one_line(value)}: give one of them")
        if not _FIRST_AGE.match(str(ages)):
            raise InputError(f"kv_cache_ages must be like 0=int8,8192=int4, got {one_line(ages)}")
        return {**arguments, "kv_cache_dtype": str(ages), "kv_cache_ages": None}
    if dtype in (None, "auto") or _FIRST_AGE.match(str(dtype)):
        raise InputError(
            f"kv_cache_floor is {one_line(floor)}: it needs a kv_cache_dtype of one format, the first level, "
            f"got {one_line(dtype or 'auto')}"
        )
    text = "".join(f",floor={level}" for level in _NEXT_LEVEL.split(str(floor).strip()))
    return {**arguments, "kv_cache_dtype": f"0={dtype}{text}", "kv_cache_floor": None}


def levels_of(kv_cache_dtype: str) -> list[str]:
    """The formats of a kv_cache_dtype with a floor, the first level first."""
    return kv_cache_dtype.removeprefix("0=").split(",floor=")
