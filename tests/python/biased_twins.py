"""Hostile twins of a model folder: the same logits on an exact cache, keys that are hard to quantize.

A bias b of K is added before RoPE, so a key at j is R(j)(k + b), and a query at i adds q R(j - i) b to its logit. That
is the same for all keys, and softmax drops it, exactly where RoPE does not turn: in pairs of channels of frequency
zero. No model has such pairs, but every model's slowest ones hardly turn. So the pair of twins is a base, whose slowest
pairs stand still (a rope scaling that any reader of the llama3 kind takes), and the base with biases there, of the kind
that Qwen2 has in q, k and v. The field's biased keys (Qwen2.5) sit in the same slow pairs.

Scaling a pair (c, c + head_dim / 2) of K by a and of Q by 1/a commutes with RoPE and leaves every product unchanged; a
is a power of two, so that not one bit of an exact cache's logits changes.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.files.safetensors_writer import write_safetensors

Tensors = dict[str, NDArray[np.float32]]
SLOWDOWN = 1e6
"""Pairs that are hardly rotated: by less than 1e-5 over 10,000 positions."""


def read_tensors(path: Path) -> tuple[Tensors, str]:
    """Name -> float32 values, and the one dtype of the file: F32 or BF16."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    (dtype,) = {str(entry["dtype"]) for entry in header.values()}
    tensors: Tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[start + begin : start + end]
        if dtype == "BF16":
            bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32) << np.uint32(16)
            values = bits.view(np.float32)
        else:
            values = np.frombuffer(raw, dtype="<f4")
        tensors[name] = values.reshape(entry["shape"]).copy()
    return tensors, dtype


def _twin(source: Path, folder: Path, change: Callable[[dict[str, Any], Tensors], None]) -> Path:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    tensors, dtype = read_tensors(source / "model.safetensors")
    change(config, tensors)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    write_safetensors(
        folder / "model.safetensors", {name: value.shape for name, value in tensors.items()}, tensors.items(), dtype
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def still_pairs(source: Path, folder: Path, pairs: int) -> Path:
    """A Llama whose `pairs` slowest RoPE pairs stand still; the others turn as they did. The base of biased_keys()."""

    def change(config: dict[str, Any], _: Tensors) -> None:
        half = config["head_dim"] // 2
        positions = config["max_position_embeddings"]
        # A wavelength between the last pair that turns and the first that does not.
        border = 2 * math.pi * config["rope_theta"] ** ((half - pairs - 0.5) / half)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": SLOWDOWN,
            "low_freq_factor": positions / (border * 1.001),
            "high_freq_factor": positions / (border * 0.999),
            "original_max_position_embeddings": positions,
        }

    return _twin(source, folder, change)


def biased_keys(source: Path, folder: Path, pairs: int, size: float, seed: int = 0) -> Path:
    """A Qwen2 with a bias of +-size (a bfloat16) on the channels of K that stand still in still_pairs(..., pairs)."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        random = np.random.default_rng(seed)
        head_dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        half = head_dim // 2
        config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
        for layer in range(config["num_hidden_layers"]):
            bias = np.zeros((kv_heads, 2, half), dtype=np.float32)
            bias[..., half - pairs :] = size * random.choice([-1.0, 1.0], size=(kv_heads, 2, pairs))
            prefix = f"model.layers.{layer}.self_attn."
            tensors[f"{prefix}q_proj.bias"] = np.zeros(heads * head_dim, dtype=np.float32)
            tensors[f"{prefix}k_proj.bias"] = bias.reshape(-1)
            tensors[f"{prefix}v_proj.bias"] = np.zeros(kv_heads * head_dim, dtype=np.float32)

    return _twin(source, folder, change)


def outlier_channels(source: Path, folder: Path, pairs: int, factor: float, seed: int = 0) -> Path:
    """K larger by `factor` (a power of two) in `pairs` random RoPE pairs of every head, Q smaller by it."""

    def change(config: dict[str, Any], tensors: Tensors) -> None:
        random = np.random.default_rng(seed)
        head_dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        half, group = head_dim // 2, heads // kv_heads
        for layer in range(config["num_hidden_layers"]):
            scale = np.ones((kv_heads, head_dim), dtype=np.float32)
            for head in range(kv_heads):
                chosen = random.choice(half, size=pairs, replace=False)
                scale[head, chosen] = scale[head, chosen + half] = factor
            for side, rows in (("q", 1 / np.repeat(scale, group, axis=0)), ("k", scale)):
                prefix = f"model.layers.{layer}.self_attn.{side}_proj."
                for name in (f"{prefix}weight", f"{prefix}bias"):
                    if name in tensors:
                        shape = (-1, *[1] * (tensors[name].ndim - 1))
                        tensors[name] *= rows.astype(np.float32).reshape(shape)

    return _twin(source, folder, change)
