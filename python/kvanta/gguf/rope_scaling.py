"""The rope's scaling in GGUF files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata


@dataclass(frozen=True)
class PublishedScaling:
    """Parameters of rope scaling of the type llama3 that all published models of a name have."""

    model: str
    low: float
    high: float
    original: int


LLAMA3 = PublishedScaling("Llama 3.x", 1.0, 4.0, 8192)
STEP35 = PublishedScaling("Step 3.5", 1.0, 32.0, 131072)
_WITH_LONGROPE = ("phi3", "phimoe", "minicpm")


def llama3_scaling(
    metadata: Metadata, head_dim: int, theta: float, known: PublishedScaling = LLAMA3
) -> dict[str, Any] | None:
    """Llama 3.1's rope scaling from the factors of frequencies that GGUF stores instead of its parameters.

    None for a file without them.
    """
    tensor = metadata.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    factors = metadata.values(tensor).astype(np.float64).ravel()
    low, high, original = known.low, known.high, known.original
    factor = float(factors.max(initial=0.0))
    with np.errstate(all="ignore"):  # zeros, NaN: they will not be close to what is expected
        wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / np.float64(factor) + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise InputError(
            f"{metadata.path}: the frequency factors in 'rope_freqs.weight' are not those of {known.model}"
        )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def rope_scaling(metadata: Metadata, rotated: int, theta: float) -> dict[str, Any] | None:
    if (llama3 := llama3_scaling(metadata, rotated, theta)) is not None:
        return llama3
    # llama.cpp scales linearly where the file names no type, and knows an older key.
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "linear")
    if kind == "none" or (kind == "longrope" and metadata.architecture in _WITH_LONGROPE):
        return None  # families.py reads the factors of longrope
    if kind not in ("linear", "yarn"):
        raise InputError(
            f"{metadata.path}: rope scaling {kind!r} is not known; known: none, linear, yarn, llama3, "
            f"longrope of {' and '.join(_WITH_LONGROPE)}"
        )
    factor_key = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
    is_scaled = metadata.value(f"{metadata.architecture}.{factor_key}") not in (None, 0)
    factor = metadata.number(factor_key) if is_scaled else 1.0
    if kind == "linear" and factor == 1.0:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.size(
            "rope.scaling.original_context_length", metadata.size("context_length")
        )
        for key, name in (("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"), ("attention_factor", "attn_factor")):
            if metadata.has(f"rope.scaling.yarn_{name}"):
                scaling[key] = metadata.number(f"rope.scaling.yarn_{name}")
    return scaling
