"""Progress bars for long work: on a terminal only, so that logs and pipes stay clean."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

UseTqdm = bool | Callable[..., Any] | None
"""True or False; a callable that makes a bar of tqdm's arguments; None: as it fits."""


def progress_bar(total: int | None, what: str, unit: str = "B", show: UseTqdm = None) -> tqdm[Any]:
    """A bar on stderr that counts `unit`s up to `total`. `show=None`: only if stderr is a terminal."""
    if callable(show):
        bar: tqdm[Any] = show(total=total, desc=what, unit=unit)
        return bar
    hidden = not (sys.stderr.isatty() if show is None else show)
    in_bytes = unit == "B"
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=in_bytes,
        unit_divisor=1024,
        disable=hidden,
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
    )
