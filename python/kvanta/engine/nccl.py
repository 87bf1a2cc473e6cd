"""NCCL of Python packages, which the system's loader does not find by itself."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from pathlib import Path


def nccl_library() -> str:
    """The library of nvidia-nccl-cu12 or nvidia-nccl-cu13 in this environment; empty without one."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        library = Path(folder, "nccl", "lib", "libnccl.so.2")
        if library.is_file():
            return str(library)
    return ""


def load(library: str) -> None:
    """Loads it into this process, where the engine then finds it by its name. The engine says what it does not find."""
    with contextlib.suppress(OSError):
        if library:
            ctypes.CDLL(library)
