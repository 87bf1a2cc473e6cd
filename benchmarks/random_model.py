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


def write_random_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes random weights of a `llama_config`, and a tokenizer of bytes and made-up words; returns the folder."""
    folder.mkdir()
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        shapes |= {f"{name}self_attn.{part}_proj.weight": shape for part, shape in attention.items()}
        shapes |= {f"{name}mlp.{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    random = np.random.default_rng(15)

    def values(shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        weights = random.standard_normal(shape, np.float32)
        weights *= shape[1] ** -0.5
        return weights

    write_safetensors(folder / "model.safetensors", shapes, ((name, values(shape)) for name, shape in shapes.items()))
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
