"""Progress bars for long work: on a terminal only, so that logs and pipes stay clean."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int | None, what: str, unit: str = "B", show: bool | None = None) -> tqdm[Any]:
    """A bar on stderr that counts `unit`s up to `total`. `show=None`: only if stderr is a terminal."""
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
