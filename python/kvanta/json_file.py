"""Reading of JSON files in a model's folder, or beside it, and values that JSON can have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvanta.errors import InputError, reason_of
from kvanta.values import one_line


def read_json_file(file: Path, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """The file's object or list, as `kind` says. Raises InputError with the file's name."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, kind):
        raise InputError(f"{file} must hold {'an object' if kind is dict else 'a list'}, got {one_line(content)}")
    return content


def finite_values(value: Any) -> Any:
    """A copy with None in place of NaN and infinities, which json.dumps would write as what is no JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_values(entry) for key, entry in value.items()}
    return [finite_values(entry) for entry in value] if isinstance(value, (list, tuple)) else value
