"""Divergences measured by a search, stored with their reference, so that an interrupted search resumes."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path


class DivergenceLog:
    """One line per scheme: [kv_cache_dtype, kv_cache_dtype_layers, mean divergence in nats]."""

    def __init__(self, folder: Path, key: str) -> None:
        """`key`: of the engine options that the schemes share, which may differ from the reference's."""
        self._file = folder / f"divergences-{key}.jsonl"
        self._known: dict[tuple[str, str], float] = {}
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in self._file.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # the last line of a killed process
                    scheme, layers, value = json.loads(line)
                    if isinstance(value, float) and math.isfinite(value) and value >= 0:
                        self._known[scheme, layers] = value

    def get(self, scheme: str, layers: str) -> float | None:
        """The measured divergence, or None."""
        return self._known.get((scheme, layers))

    def add(self, scheme: str, layers: str, value: float) -> None:
        """Keeps it; a disk that is full only costs the memory of it."""
        self._known[scheme, layers] = value
        with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([scheme, layers, value]) + "\n")
