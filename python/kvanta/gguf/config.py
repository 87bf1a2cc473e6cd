"""config.json from the metadata of a GGUF file: what all architectures have in common."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvanta.errors import InputError
from kvanta.gguf.families import ARCHITECTURES
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.recurrent_families import kv_heads_of_layers

# Architectures that may rotate a part of each head.
_PARTLY_ROTATED = {
    *("phi3", "glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe", "minimax-m2", "nemotron", "stablelm"),
    *("phi2", "gptneox", "chatglm"),
}
_WITHOUT_ROPE = {"gpt2"}
_WITH_LONGROPE = ("phi3", "phimoe", "minicpm")


def _llama3_scaling(metadata: Metadata, factors: np.ndarray[Any, Any], head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3.1's rope scaling from the per-frequency factors that GGUF stores instead of its parameters."""
    low, high, original = 1.0, 4.0, 8192  # of every published Llama 3.x
    factor = float(factors.max(initial=0.0))
    with np.errstate(all="ignore"):  # zeros, NaN: they will not be close to what is expected
        wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
        smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / np.float64(factor) + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise InputError(f"{metadata.path}: the frequency factors in 'rope_freqs.weight' are not those of Llama 3.x")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _rope_scaling(metadata: Metadata, rotated: int, theta: float) -> dict[str, Any] | None:
    freqs = metadata.tensors.get("rope_freqs.weight")
    if freqs is not None:
        return _llama3_scaling(metadata, metadata.values(freqs).astype(np.float64).ravel(), rotated, theta)
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


def _check_heads(metadata: Metadata, config: dict[str, Any], rotated: int) -> None:
    heads, kv_heads, head_dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if heads % kv_heads != 0 or head_dim % 2 != 0:
        raise InputError(f"{metadata.path} has {heads} heads of {head_dim} for {kv_heads} KV heads, which do not fit")
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{metadata.path} has values of another size than its keys, which is not supported")
    if metadata.architecture in _PARTLY_ROTATED:
        config["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim and metadata.architecture not in _WITHOUT_ROPE:
        raise InputError(f"{metadata.path} rotates only a part of each head, which is not supported")


def hugging_face_config(metadata: Metadata, vocabulary: int) -> dict[str, Any]:
    """Hugging Face's config without the keys that depend on the tensors (tie_word_embeddings, biases)."""
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise InputError(f"{metadata.path} has the architecture {architecture!r}; known: {known}")
    family = ARCHITECTURES[architecture]
    if metadata.count("expert_count") > 1 and not family.has_experts:
        raise InputError(f"{metadata.path} is a mixture of experts, which {architecture!r} models are not")
    # As in llama.cpp, the list of tokens counts, whatever the key vocab_size says.
    layers = metadata.size("block_count")
    if layers > len(metadata.tensors):
        raise InputError(f"{metadata.path} says {layers} layers in {len(metadata.tensors)} tensors")
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", max(1, hidden // heads))
    if family.has_layers_without_kv:
        kv_heads = max(kv_heads_of_layers(metadata, layers))
    else:
        kv_heads = 0 if family.has_sizes_by_layer else metadata.size("attention.head_count_kv", heads)
    rotated = metadata.size("rope.dimension_count", head_dim)
    by_layer = family.has_sizes_by_layer
    theta = metadata.number("rope.freq_base", 10000.0)
    epsilon = metadata.number(f"attention.layer_norm_{'' if family.layer_norm_eps else 'rms_'}epsilon")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": 0 if by_layer else metadata.size("feed_forward_length", 1 if family.has_experts else None),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": metadata.size("context_length"),
        family.layer_norm_eps or "rms_norm_eps": float(f"{epsilon:.6g}"),  # stored as f32: 9.99999975e-06 means 1e-05
        "rope_theta": theta,
        "rope_scaling": None if by_layer else _rope_scaling(metadata, rotated, theta),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if not family.is_latent and not by_layer:
        _check_heads(metadata, config, rotated)
    family.complete(metadata, config)
    if not metadata.flag(f"{architecture}.attention.causal", True):
        config["is_causal"] = False  # which the engine refuses
    return config
