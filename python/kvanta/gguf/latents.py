"""Keys of multi-head latent attention in GGUF files."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata


def latent_sizes(metadata: Metadata, config: dict[str, Any]) -> None:
    """Sizes of the latents, and of each head's parts."""
    rank, rope = metadata.size("attention.kv_lora_rank"), metadata.size("rope.dimension_count")
    has_mla_keys = metadata.has("attention.key_length_mla")  # newer files: the others describe the latent
    key = metadata.size("attention.key_length_mla" if has_mla_keys else "attention.key_length")
    value = metadata.size("attention.value_length_mla" if has_mla_keys else "attention.value_length")
    if key <= rope:
        raise InputError(f"{metadata.path} has keys of {key} channels, of which {rope} are rotated, which do not fit")
    config |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value}
    config["q_lora_rank"] = metadata.count("attention.q_lora_rank") or None
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["head_dim"] = rope
