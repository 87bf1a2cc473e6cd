"""The files of a model in GGUF: one, or the parts of a split one ("model-00001-of-00003.gguf")."""

from __future__ import annotations

import re
from pathlib import Path

from kvanta.errors import InputError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 10_000


def part_paths(path: Path) -> list[Path]:
    """All parts of the file, in order, by the name of any of them. Raises InputError for a missing one."""
    name = _PART.fullmatch(path.name)
    if name is None:
        return [path]
    count = int(name["count"])
    if not 1 <= int(name["number"]) <= count <= _MAX_PARTS:
        raise InputError(f"{path} is named as part {int(name['number'])} of {count}")
    suffix = path.suffix
    paths = [path.with_name(f"{name['stem']}-{part:05}-of-{count:05}{suffix}") for part in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{path} is a part of {count}, of which {missing[0]!r}{others} is missing in {path.parent}")
    return paths


def model_name(path: Path) -> str:
    """The file's name without its suffix and number of part."""
    name = _PART.fullmatch(path.name)
    return path.stem if name is None else name["stem"]
