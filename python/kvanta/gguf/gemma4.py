"""The keys of Gemma 4 in GGUF files: two sizes of heads, shared layers, wider MLPs, experts in addition to the MLP."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.window_families import window_layers

Config = dict[str, Any]
_NOT_ROTATED = 1e10  # a frequency divided by more than this does not rotate; files have 1e30


def gemma4(metadata: Metadata, config: Config) -> None:
    config["hidden_activation"] = config.pop("hidden_act").replace("silu", "gelu_pytorch_tanh")
    window_layers(metadata, config, 6)
    _heads(metadata, config)
    _shared_layers(metadata, config)
    _ropes(metadata, config)
    config["final_logit_softcapping"] = None
    if metadata.value("gemma4.final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    config["hidden_size_per_layer_input"] = metadata.count("embedding_length_per_layer_input")
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    if metadata.count("expert_count") > 0:
        config |= {
            "enable_moe_block": True,
            "num_experts": metadata.size("expert_count"),
            "top_k_experts": metadata.size("expert_used_count"),
            "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        }


def _head_dim(metadata: Metadata, suffix: str) -> int:
    """Channels of the heads of layers with a window ("_swa") or without ("")."""
    head_dim = metadata.size(f"attention.key_length{suffix}")
    if metadata.size(f"attention.value_length{suffix}", head_dim) != head_dim:
        raise InputError(f"{metadata.path} has values of another size than its keys, which is not supported")
    if metadata.size(f"rope.dimension_count{suffix}", head_dim) != head_dim:
        raise InputError(f"{metadata.path} rotates only a part of each head, which is not supported")
    return head_dim


def _heads(metadata: Metadata, config: Config) -> None:
    layers = config["num_hidden_layers"]
    kv_heads = metadata.sizes("attention.head_count_kv", layers)
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    if True not in windows:
        raise InputError(f"{metadata.path} has no layer with a window, which is not supported for 'gemma4'")
    common = {"head_dim": _head_dim(metadata, "_swa"), "num_key_value_heads": kv_heads[windows.index(True)]}
    config |= common
    full = _head_dim(metadata, "")
    own = [
        {"head_dim": common["head_dim"] if has_window else full, "num_key_value_heads": count}
        for has_window, count in zip(windows, kv_heads, strict=True)
    ]
    config["per_layer_config"] = {str(layer): heads for layer, heads in enumerate(own) if heads != common}


def _shared_layers(metadata: Metadata, config: Config) -> None:
    """Layers without their own K and V, whose MLPs may be twice as wide; keys that are values."""
    layers, shared = config["num_hidden_layers"], metadata.count("attention.shared_kv_layers")
    if shared >= layers:
        raise InputError(f"{metadata.path} has {layers} layers, all of which share K and V")
    config["num_kv_shared_layers"] = shared
    widths = metadata.sizes("feed_forward_length", layers)
    config["intermediate_size"] = widths[0]
    config["use_double_wide_mlp"] = shared > 0 and widths[-1] != widths[0]
    last = widths[0] * (2 if config["use_double_wide_mlp"] else 1)
    if widths != [widths[0]] * (layers - shared) + [last] * shared:
        raise InputError(
            f"{metadata.path}: MLPs of {sorted(set(widths))} channels; in 'gemma4' all have as many, or the last "
            f"{shared}, which share K and V, twice as many"
        )
    own = [f"blk.{i}.attn_v.weight" for i in range(layers - shared) if config["layer_types"][i] == "full_attention"]
    config["attention_k_eq_v"] = bool(own) and not any(name in metadata.tensors for name in own)


def _ropes(metadata: Metadata, config: Config) -> None:
    """A frequency factor of 1 rotates a pair of channels of the layers without a window, a huge one does not."""
    if metadata.has("rope.scaling.type") and metadata.text("gemma4.rope.scaling.type") != "none":
        raise InputError(f"{metadata.path} has scaled rope frequencies, which 'gemma4' models do not have")
    theta = config.pop("rope_theta")
    del config["rope_scaling"]
    pairs = metadata.size("attention.key_length") // 2
    tensor = metadata.tensors.get("rope_freqs.weight")
    factors = np.ones(pairs) if tensor is None else metadata.values(tensor).ravel()
    rotated = int(np.count_nonzero(factors == 1))
    if len(factors) != pairs or not (factors[:rotated] == 1).all() or not (factors[rotated:] > _NOT_ROTATED).all():
        raise InputError(
            f"{metadata.path}: the frequency factors in 'rope_freqs.weight' are not ones and then huge ones, "
            f"{pairs} in all"
        )
    share = rotated / pairs
    if int(share * pairs) < rotated:  # as the share is read
        share = math.nextafter(share, 1)
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", theta)},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": share,
            "rope_theta": theta,
        },
    }
