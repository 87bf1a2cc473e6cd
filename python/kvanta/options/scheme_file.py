"""Scheme files: a JSON file that gives each layer's cache scheme; --kv-cache-dtype takes its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvanta.errors import InputError, ResourceError, reason_of
from kvanta.files.json_file import read_regular_file
from kvanta.params.checks import one_line

_VERSION = 1


def is_scheme_file(value: object) -> bool:
    """True if a value of kv_cache_dtype names a file; no scheme's text ends in .json."""
    return isinstance(value, str) and value.lower().endswith(".json")


def read_scheme_file(file: str, layers: int) -> str:
    """The file's schemes as kv_cache_dtype_layers has them, for a model of `layers` layers. Raises InputError."""
    return join_layers(read_layer_schemes(file, layers))


def read_layer_schemes(file: str, layers: int) -> list[str]:
    """The scheme of each layer. Raises InputError."""
    try:
        content = json.loads(read_regular_file(Path(file)))
    except OSError as error:
        raise InputError(f"the scheme file {file!r} cannot be read: {reason_of(error)}") from None
    except (ValueError, RecursionError):
        raise InputError(f"the scheme file {file!r} is not JSON") from None
    if not isinstance(content, Mapping) or content.get("kvanta_scheme_version") != _VERSION:
        raise InputError(f"the scheme file {file!r} has no 'kvanta_scheme_version' of {_VERSION}, the only one known")
    schemes = content.get("layers")
    if not isinstance(schemes, list) or not all(isinstance(scheme, str) for scheme in schemes):
        raise InputError(f"the scheme file {file!r}: 'layers' must be a list of schemes, got {one_line(schemes)}")
    for scheme in schemes:
        if not scheme or ";" in scheme:
            raise InputError(f"the scheme file {file!r}: {one_line(scheme)} is not a scheme, such as k=int8,v=int4")
    if len(schemes) != layers:
        raise InputError(f"the scheme file {file!r} is for a model of {len(schemes)} layers; this one has {layers}")
    return schemes


def join_layers(schemes: Sequence[str]) -> str:
    """One scheme per layer, as kv_cache_dtype_layers has them; neighbours that are equal share an entry."""
    starts = [index for index, scheme in enumerate(schemes) if index == 0 or scheme != schemes[index - 1]]
    ends = [*(start - 1 for start in starts[1:]), len(schemes) - 1]
    ranges = zip(starts, ends, strict=True)
    return ";".join(f"{f if f == last else f'{f}-{last}'}={schemes[f]}" for f, last in ranges)


def write_scheme_file(file: str, schemes: Sequence[str], about: Mapping[str, Any]) -> None:
    """`about`: further keys, for readers. Raises ResourceError."""
    content = {"kvanta_scheme_version": _VERSION, **about, "layers": list(schemes)}
    try:
        Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"cannot write {file!r}: {reason_of(error)}") from None
