"""Random small checkpoints in Hugging Face layout, written without torch; with the tokenizer of stories260k."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.checkpoint.resolve import SHIPPED
from kvanta.files.safetensors_writer import write_safetensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape, for a config with the keys of CONFIG."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        result |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            result |= {f"{prefix}self_attn.{side}_norm.weight": (head_dim,) for side in "qk"}
        for side, width in (("q", q), ("k", kv), ("v", kv)):
            result[f"{prefix}self_attn.{side}_proj.weight"] = (width, hidden)
            if config["model_type"] in ("qwen2", "qwen2_moe", "gpt_oss"):
                result[f"{prefix}self_attn.{side}_proj.bias"] = (width,)
        result[f"{prefix}self_attn.o_proj.weight"] = (hidden, q)
        if config["model_type"] == "gpt_oss":
            result |= {f"{prefix}self_attn.o_proj.bias": (hidden,), f"{prefix}self_attn.sinks": (q // head_dim,)}
        result |= _mlp_shapes(config, prefix)
    result["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    return result


def _gated(module: str, hidden: int, width: int, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    """Gate, up and down of an MLP."""
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    return {f"{module}{name}.weight": size for name, size in zip(names, sizes, strict=True)}


def _mlp_shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, ffn, kind = config["hidden_size"], config["intermediate_size"], config["model_type"]
    names = ("gate_proj", "up_proj", "down_proj")
    if kind == "gpt_oss":
        count, module = config["num_local_experts"], f"{prefix}mlp."
        return {
            f"{module}router.weight": (count, hidden),
            f"{module}router.bias": (count,),
            f"{module}experts.gate_up_proj": (count, hidden, 2 * ffn),
            f"{module}experts.gate_up_proj_bias": (count, 2 * ffn),
            f"{module}experts.down_proj": (count, ffn, hidden),
            f"{module}experts.down_proj_bias": (count, hidden),
        }
    if kind not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return _gated(f"{prefix}mlp.", hidden, ffn, names)
    mixtral = kind == "mixtral"
    module = f"{prefix}block_sparse_moe." if mixtral else f"{prefix}mlp."
    count = config["num_local_experts" if mixtral else "num_experts"]
    width = ffn if mixtral else config["moe_intermediate_size"]
    result: dict[str, tuple[int, ...]] = {f"{module}gate.weight": (count, hidden)}
    for expert in range(count):
        result |= _gated(f"{module}experts.{expert}.", hidden, width, ("w1", "w3", "w2") if mixtral else names)
    if kind == "qwen2_moe":
        result |= _gated(f"{module}shared_expert.", hidden, config["shared_expert_intermediate_size"], names)
        result[f"{module}shared_expert_gate.weight"] = (1, hidden)
    return result


def _weights(shapes_by_name: dict[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    random = np.random.default_rng(seed)
    for name, shape in shapes_by_name.items():
        noise = random.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            yield name, np.ones(shape, dtype=np.float32)
        elif name.endswith(("bias", "sinks")):
            yield name, np.float32(0.5) * noise
        elif "embed" in name:
            yield name, noise
        else:  # gains, so that attention is peaked and a cache's errors show
            gain = 2.0 if "q_proj" in name or "k_proj" in name or "o_proj" in name else 1.0
            yield name, np.float32(gain / shape[-1] ** 0.5) * noise


def write_checkpoint(folder: Path, seed: int = 0, dtype: str = "F32", **changes: Any) -> Path:
    """A random model; `changes` are keys of config.json."""
    config = CONFIG | changes
    folder.mkdir(parents=True, exist_ok=True)
    shapes_by_name = shapes(config)
    write_safetensors(folder / "model.safetensors", shapes_by_name, _weights(shapes_by_name, seed), dtype)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SHIPPED / "stories260k" / name, folder / name)
    return folder
