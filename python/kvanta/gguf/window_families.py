"""Sliding windows of layers in GGUF files, and the other keys of EXAONE 4.0 and Command R."""

from __future__ import annotations

from typing import Any

from kvanta.gguf.metadata import Metadata

Config = dict[str, Any]


def window_layers(metadata: Metadata, config: Config, step: int, window: int | None = None) -> None:
    """layer_types and sliding_window, from a list of flags or full attention in every `step`-th layer.

    `window`: where the file has none. 0: no layer has a window.
    """
    name = "attention.sliding_window_pattern"
    key = f"{metadata.architecture}.{name}"
    layers = config["num_hidden_layers"]
    if isinstance(metadata.value(key), list):
        flags = metadata.array(key, bool, layers)
    else:  # a number is a step, 0 one without end
        flags = every(layers, (metadata.count(name) or layers + 1) if metadata.has(name) else step)
    if metadata.value(f"{metadata.architecture}.attention.sliding_window") == 0 or (
        window == 0 and not metadata.has("attention.sliding_window")
    ):
        flags, config["sliding_window"] = [False] * layers, config["max_position_embeddings"]
    else:
        config["sliding_window"] = metadata.size("attention.sliding_window", window)
    config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]


def every(layers: int, step: int) -> list[bool]:
    """True for all layers but each `step`-th."""
    return [(layer + 1) % step != 0 for layer in range(layers)]


def exaone4(metadata: Metadata, config: Config) -> None:
    # The first files of the model of 32 B lack the key; the one of 1.2 B has no windows.
    is_32b = config["num_hidden_layers"] == 64 and not metadata.has("attention.sliding_window")
    if is_32b or metadata.count("attention.sliding_window") > 0:
        window_layers(metadata, config, 4, window=4096)
    else:
        config["sliding_window"] = None


def command_r(metadata: Metadata, config: Config) -> None:
    config["logit_scale"] = metadata.number("logit_scale")
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in metadata.tensors


def cohere2(metadata: Metadata, config: Config) -> None:
    config["logit_scale"] = metadata.number("logit_scale")
    window_layers(metadata, config, 4)
