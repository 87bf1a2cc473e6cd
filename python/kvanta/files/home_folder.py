"""Place of all that Kvanta prepares once and keeps."""

from __future__ import annotations

import os
from pathlib import Path

from kvanta.errors import InputError

# Part of the name of every folder that is made from a GGUF file: a new converter makes another.
CONVERTER_VERSION = 9


def kvanta_home() -> Path:
    """Folder of prepared models: $KVANTA_HOME, or ~/.cache/kvanta. Raises InputError if there is no home folder."""
    home = os.environ.get("KVANTA_HOME")
    return Path(home).expanduser() if home else user_home("KVANTA_HOME") / ".cache" / "kvanta"


def user_home(instead: str) -> Path:
    """The user's home folder, which must exist: containers often name one that does not.

    `instead`: the environment variable that names another place.
    """
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know
        raise InputError(f"this user has no home folder; set {instead} to a folder for downloads") from None
    if not home.is_dir():
        raise InputError(f"the home folder {str(home)!r} does not exist; set {instead} to a folder for downloads")
    return home
