"""A model of the file of --models. This module needs none of the server's packages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelEntry:
    """One model of the file."""

    name: str
    path: str
    """MODEL of the command line."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `kvanta serve`, by their first names."""
    memory: int | None = None
    """Bytes of weights and cache; None: as model_memory finds them."""
    keep_alive: float = math.inf
    """Seconds without a request after which the model is unloaded."""
