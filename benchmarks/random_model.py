"""A model folder in Hugging Face layout with random bf16 weights, to compare speed with other engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.files.safetensors_writer import write_safetensors
from kvanta.text.detokenize import byte_level_alphabet


def llama_config(
    *, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, context: int
) -> dict[str, Any]:
    """Configuration of a Llama model whose output matrix is that of its embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


LLAMA_1B = llama_config(
    hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocab=128256, context=32768
)
"""1.2 billion weights."""


QWEN35_HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 16,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
"""A small Qwen3.5, of 370 million weights."""


def _delta_net_shapes(config: Mapping[str, Any], module: str) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    return {
        f"{module}in_proj_qkv.weight": (channels, hidden),
        f"{module}in_proj_z.weight": (values, hidden),
        f"{module}in_proj_b.weight": (heads, hidden),
        f"{module}in_proj_a.weight": (heads, hidden),
        f"{module}conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        f"{module}dt_bias": (heads,),
        f"{module}A_log": (heads,),
        f"{module}norm.weight": (config["linear_value_head_dim"],),
        f"{module}out_proj.weight": (hidden, values),
    }


def _attention_shapes(config: Mapping[str, Any], module: str, is_hybrid: bool) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    gated = 2 * q if is_hybrid else q
    parts = {"q": (gated, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes: dict[str, tuple[int, ...]] = {f"{module}{part}_proj.weight": shape for part, shape in parts.items()}
    if is_hybrid:
        shapes |= {f"{module}{part}_norm.weight": (head_dim,) for part in ("q", "k")}
    return shapes


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    types = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer, kind in enumerate(types):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        if kind == "full_attention":
            shapes |= _attention_shapes(config, f"{name}self_attn.", "layer_types" in config)
        else:
            shapes |= _delta_net_shapes(config, f"{name}linear_attn.")
        shapes |= {f"{name}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def write_random_model(folder: Path, config: Mapping[str, Any], gain: float = 1.0) -> Path:
    """Writes random weights of a `llama_config` or QWEN35_HYBRID, and a tokenizer of bytes and made-up words.

    gain: factor of what layers add to the hidden states. With a small one the next token depends on the last one alone,
    so that greedy text soon repeats itself. Returns the folder.
    """
    folder.mkdir()
    vocab = config["vocab_size"]
    shapes = _shapes(config)
    random = np.random.default_rng(15)

    def values(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            adds_one = "layer_types" in config and not name.endswith("linear_attn.norm.weight")
            return np.full(shape, 0.0 if adds_one else 1.0, np.float32)
        weights = random.standard_normal(shape, np.float32)
        weights *= shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights *= gain
        return weights

    tensors = ((name, values(name, shape)) for name, shape in shapes.items())
    write_safetensors(folder / "model.safetensors", shapes, tensors)
    words = ["<end>", *byte_level_alphabet(), *(f"\u0120w{index}" for index in range(vocab))][:vocab]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {word: index for index, word in enumerate(words)}, "merges": []},
    }
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
