"""Tokens from which the engine measures static scales when it loads a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvanta import _core


def probe_tokens(folder: Path, info: _core.ModelInfo, count: int) -> NDArray[np.int64]:
    """Tokens that begin and end texts, and random ones of std::mt19937(1)."""
    config = json.loads((folder / "config.json").read_text())
    first = config.get("bos_token_id", config.get("text_config", {}).get("bos_token_id"))
    drawn = np.random.RandomState(1)._bit_generator.random_raw(count) % info.vocab
    known = [] if first is None else [first]
    return np.concatenate([[*known, *info.eos_token_ids], drawn])[:count].astype(np.int64)
