"""Place of all that Kvanta prepares once and keeps."""

from __future__ import annotations

import os
from pathlib import Path

# Part of the name of every folder that is made from a GGUF file: a new converter makes another.
CONVERTER_VERSION = 6


def kvanta_home() -> Path:
    """Folder of prepared models: $KVANTA_HOME, or ~/.cache/kvanta."""
    home = os.environ.get("KVANTA_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "kvanta"
