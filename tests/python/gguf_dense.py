"""Keys and tensors of GPT-2, GPT-NeoX, Falcon, Apertus and others in GGUF files, as llama.cpp converts them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_gguf import interleave

Array = NDArray[np.float32]
Config = dict[str, Any]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {"tie_word_embeddings": False}),
    "starcoder2_no_bias": ("Starcoder2", {"use_bias": False}),
    "phi": ("Phi", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoX", {"num_attention_heads": 2}),
    "gpt_neox_in_turn": ("GPTNeoX", {"use_parallel_residual": False}),
    "gpt2": ("GPT2", {"intermediate_size": 256}),
    "gpt_bigcode": ("GPTBigCode", {"intermediate_size": 256}),
    "olmo": ("Olmo", {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}),
    "jais2": ("Jais2", {"head_dim": 32}),
    "falcon": ("Falcon", {"num_attention_heads": 2}),
    "falcon_groups": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon_two_norms": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "apertus": ("Apertus", {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "glm": ("Glm", {"head_dim": 32, "pad_token_id": 0}),
}
ARCHITECTURES = {
    "starcoder2": "STARCODER2",
    "phi": "PHI2",
    "gpt_neox": "GPTNEOX",
    "gpt2": "GPT2",
    "gpt_bigcode": "STARCODER",
    "olmo": "OLMO",
    "jais2": "JAIS2",
    "falcon": "FALCON",
    "apertus": "APERTUS",
    "glm": "CHATGLM",
}
PAIRED_ROPE = {"INTERNLM2", "MINICPM", "OLMO"}
LAYER_NORM_EPS = {
    "starcoder2": "norm_epsilon",
    "phi": "layer_norm_eps",
    "gpt_neox": "layer_norm_eps",
    **dict.fromkeys(("gpt2", "gpt_bigcode"), "layer_norm_epsilon"),
    **dict.fromkeys(("jais2", "olmo"), "layer_norm_eps"),
    "falcon": "layer_norm_epsilon",
}
_XIELU = ("alpha_n", "alpha_p", "beta", "eps")
_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "ffn_hidden_size": "intermediate_size",
}


def common_config(config: Config) -> Config:
    """With keys under the names that most classes have."""
    config = config | {common: config[own] for own, common in _GPT2_KEYS.items() if own in config}
    heads = config["num_attention_heads"]
    if config["model_type"] == "falcon":
        is_grouped = config["new_decoder_architecture"]
        config["num_key_value_heads"] = config["num_kv_heads"] if is_grouped else 1 if config["multi_query"] else heads
    if config["model_type"] == "gpt_bigcode":
        config["num_key_value_heads"] = 1 if config["multi_query"] else heads
    if config["model_type"] == "olmo":
        config["layer_norm_eps"] = 1e-5
    config.setdefault("num_key_value_heads", heads)
    return config


def add_config(writer: gguf.GGUFWriter, config: Config, tensors: dict[str, Array]) -> None:
    """Keys that few architectures have."""
    if "use_parallel_residual" in config and config["model_type"] == "gpt_neox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config["model_type"] == "apertus":
        for name in _XIELU:
            values = [
                float(tensors[f"model.layers.{layer}.mlp.act_fn.{name}"].item())
                for layer in range(config["num_hidden_layers"])
            ]
            getattr(writer, f"add_xielu_{name}")(values)


def _heads_first(config: Config) -> list[int]:
    """Rows of q, k and v of a KV head."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return [config["num_attention_heads"] // config["num_key_value_heads"] * head, head, head]


def parts(config: Config, name: str, values: Array) -> dict[str, Array] | None:
    """The tensor as the file has it; None for tensors that are the same there."""
    kind = config["model_type"]
    if ".act_fn." in name:
        return {}
    if "query_key_value" in name and kind in ("gpt_neox", "falcon"):
        by_head = values.reshape(config["num_key_value_heads"], -1, *values.shape[1:])
        rows = _heads_first(config)
        split = np.split(by_head, np.cumsum(rows)[:-1], axis=1)
        return {name: np.concatenate([part.reshape(-1, *values.shape[1:]) for part in split])}
    if kind == "gpt2" and values.ndim == 2 and ".h." in name:
        return {name: np.ascontiguousarray(values.T)}
    return None


def back(config: Config, tensors: dict[str, Array], name: str, values: Array) -> bool:
    """Undoes parts(); False for tensors that are the same in the file."""
    kind = config["model_type"]
    if "query_key_value" in name and kind in ("gpt_neox", "falcon"):
        kv_heads = config["num_key_value_heads"]
        rows = [kv_heads * count for count in _heads_first(config)]
        split = np.split(values, np.cumsum(rows)[:-1])
        by_head = [part.reshape(kv_heads, -1, *values.shape[1:]) for part in split]
        tensors[name] = np.ascontiguousarray(np.concatenate(by_head, axis=1).reshape(values.shape))
        return True
    if kind == "gpt2" and values.ndim == 2 and ".h." in name:
        tensors[name] = np.ascontiguousarray(values.T)
        return True
    return False


def fused(config: Config, tensors: dict[str, Array], is_paired: bool) -> dict[str, Array]:
    """Tensors with q, k and v of each layer as one, under the name that the file has; q and k in its order of rows."""
    heads = (config["num_attention_heads"], config["num_key_value_heads"], 0)
    result = {}
    for name, values in tensors.items():
        if ".q_proj." in name:
            each = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            ordered = [interleave(part, n) if n and is_paired else part for part, n in zip(each, heads, strict=True)]
            result[f"blk.{name.split('.')[2]}.attn_qkv.{name.rpartition('.')[2]}"] = np.concatenate(ordered)
        elif ".k_proj." not in name and ".v_proj." not in name:
            result[name] = values
    return result
