"""Reading of JSON files in a model's folder and elsewhere, and values that JSON can have."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import InputError, reason_of
from kvanta.params.checks import one_line

MAX_JSON_BYTES = 100_000_000
"""Size limit of a file: the tokenizers of large models have 35 MB."""


def read_regular_file(file: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The text of a file. Raises OSError, or ValueError for a longer file, a pipe or a device."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has {status.st_size:,} bytes, and at most {max_bytes:,} are read")
        return opened.read()


def read_json_file(file: Path, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """The file's object or list, as `kind` says. Raises InputError with the file's name."""
    try:
        content = json.loads(read_regular_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, kind):
        raise InputError(f"{file} must hold {'an object' if kind is dict else 'a list'}, got {one_line(content)}")
    return content


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of config.json: text_config, which may be within a thinker_config (Qwen-Omni).

    {} where there is none: its keys are at the top of the file.
    """
    thinker = config.get("thinker_config")
    part = (thinker if isinstance(thinker, Mapping) else config).get("text_config")
    return part if isinstance(part, Mapping) else {}


def finite_values(value: Any) -> Any:
    """A copy with None in place of NaN and infinities, which json.dumps would write as what is no JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_values(entry) for key, entry in value.items()}
    return [finite_values(entry) for entry in value] if isinstance(value, (list, tuple)) else value
