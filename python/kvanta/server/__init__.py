"""An HTTP server that speaks OpenAI's API. Needs the packages of `pip install kvanta[serve]`; nothing else does."""

from __future__ import annotations

import importlib.util

from kvanta.errors import InputError

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "orjson")


def check_packages() -> None:
    """Raises InputError, with the command that installs them, when packages are missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the server needs {', '.join(missing)}; install with: pip install 'kvanta[serve]'")
