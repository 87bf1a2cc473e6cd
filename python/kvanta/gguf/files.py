"""Headers of a GGUF file's parts, which must belong together."""

from __future__ import annotations

from pathlib import Path

from kvanta.errors import InputError
from kvanta.gguf.header import Header, read_header
from kvanta.gguf.parts import part_paths


def read_parts(path: Path) -> list[Header]:
    """Headers of all parts; the first has the keys. Raises InputError if they do not belong together."""
    paths = part_paths(path)
    headers = [read_header(part) for part in paths]
    for number, header in enumerate(headers):
        count = header.values.get("split.count", 1)
        if len(paths) == 1 and isinstance(count, int) and count > 1:
            raise InputError(
                f"{header.path} is one of {count} parts, but its name does not end in '-00001-of-{count:05}.gguf', by "
                "which the others are found"
            )
        if len(paths) > 1 and (count != len(paths) or header.values.get("split.no") != number):
            said = f"part {header.values.get('split.no')} of {count}, counted from 0"
            raise InputError(f"{header.path} is by its name part {number} of {len(paths)}, by its keys {said}")
    total = headers[0].values.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if len(paths) > 1 and total is not None and total != found:
        raise InputError(f"{headers[0].path} says {total} tensors in {len(paths)} parts, which have {found}")
    names: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in names:
                raise InputError(f"{header.path}: tensor {tensor.name!r} is also in {names[tensor.name].name}")
            names[tensor.name] = header.path
    return headers
