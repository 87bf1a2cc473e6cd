"""The engine's counters of every replica, as this process's routers have last seen them.

A separate module: Ray sends the router's class to handles by value, with copies of its module's variables.
"""

from __future__ import annotations

from typing import Any

LATEST: dict[str, dict[str, dict[str, Any]]] = {}
"""Statistics by the deployment's name and Ray's id of the replica."""
