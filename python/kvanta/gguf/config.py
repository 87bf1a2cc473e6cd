"""config.json from the metadata of a GGUF file: what all architectures have in common."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.families import ARCHITECTURES
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.recurrent_families import kv_heads_of_layers
from kvanta.gguf.rope_scaling import rope_scaling

# Architectures that may rotate a part of each head.
_PARTLY_ROTATED = {
    *("phi3", "glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe", "minimax-m2", "nemotron", "stablelm"),
    *("phi2", "gptneox", "chatglm"),
}
_WITHOUT_ROPE = {"gpt2"}


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


def _heads(metadata: Metadata) -> int:
    """Query heads of the first layer: `complete` sets those of others."""
    key = f"{metadata.architecture}.attention.head_count"
    if isinstance(metadata.value(key), list):
        return metadata.sizes("attention.head_count", metadata.size("block_count"))[0]
    return metadata.size("attention.head_count")


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
    hidden, heads = metadata.size("embedding_length"), _heads(metadata)
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
        "rope_scaling": None if by_layer else rope_scaling(metadata, rotated, theta),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if not family.is_latent and not by_layer:
        _check_heads(metadata, config, rotated)
    family.complete(metadata, config)
    is_causal = metadata.flag(f"{architecture}.attention.causal", True)
    if not is_causal and "use_bidirectional_attention" not in config:
        config["is_causal"] = False  # which the engine refuses
    return config
