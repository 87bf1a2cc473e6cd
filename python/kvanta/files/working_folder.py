"""Temporary folders next to their target, which therefore appears complete or not at all."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvanta.errors import ResourceError, reason_of


@contextlib.contextmanager
def working_folder(target: Path) -> Iterator[Path]:
    """A hidden folder next to `target`, whose parent is made if missing; what is left of it at the end is removed.

    Raises ResourceError if the folder cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ResourceError(f"cannot write to {str(target.parent)!r}: {reason_of(error)}") from None
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
