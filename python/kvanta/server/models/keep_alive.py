"""`keep_alive` of Ollama's requests: how long a model stays in memory after them."""

from __future__ import annotations

import math
import re
from typing import Any

from kvanta.errors import InputError
from kvanta.params.checks import one_line

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"


def read_keep_alive(value: Any, field: str = "keep_alive") -> float:
    """Seconds of a number or of a duration such as "5m" or "1h30m"; infinite for negative ones. Raises InputError."""
    text = str(value).strip() if isinstance(value, (int, float, str)) and not isinstance(value, bool) else ""
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)", text):
        seconds = float(text)
    elif re.fullmatch(rf"[+-]?({_PART})+", text):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text))
        seconds = -seconds if text.startswith("-") else seconds
    else:
        raise InputError(
            f"{field} must be seconds or a duration such as '5m', with -1 for ever, got {one_line(value)}", field
        )
    return math.inf if seconds < 0 else min(seconds, 1e9)
