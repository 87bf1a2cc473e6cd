"""config.json's keys of GPT-2, GPT-NeoX, OLMo, Phi, StarCoder, StableLM, Falcon, Apertus, MiniCPM and others in GGUF.

llama.cpp computes every GELU by the tanh formula; the models' own classes, which the engine follows, have others.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvanta.errors import InputError
from kvanta.gguf.metadata import Metadata

Config = dict[str, Any]


def _has_bias(metadata: Metadata, module: str) -> bool:
    return f"blk.0.{module}.bias" in metadata.tensors


def _has_qkv_bias(metadata: Metadata) -> bool:
    return _has_bias(metadata, "attn_qkv") or _has_bias(metadata, "attn_q")


def starcoder2(metadata: Metadata, config: Config) -> None:
    has_window = metadata.count("attention.sliding_window") > 0
    config["sliding_window"] = metadata.size("attention.sliding_window") if has_window else None
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["use_bias"] = _has_qkv_bias(metadata)


def phi3(metadata: Metadata, config: Config) -> None:
    config["original_max_position_embeddings"] = metadata.size(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    if metadata.has("attention.sliding_window"):
        window = metadata.count("attention.sliding_window")
        config["sliding_window"] = window if 0 < window < config["max_position_embeddings"] else None
    _longrope(metadata, config)


def _longrope(metadata: Metadata, config: Config) -> None:
    factors = {f"{name}_factor": metadata.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")}
    if all(tensor is not None for tensor in factors.values()):
        config["rope_scaling"] = {"rope_type": "longrope"} | {
            name: metadata.values(tensor).ravel().tolist() for name, tensor in factors.items() if tensor is not None
        }


def squared_relu(_metadata: Metadata, config: Config) -> None:
    config["hidden_act"] = "relu2"


def stablelm(metadata: Metadata, config: Config) -> None:
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in metadata.tensors
    # As in llama.cpp, whatever the file's key says.
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in metadata.tensors


def phi2(_metadata: Metadata, config: Config) -> None:
    config["hidden_act"] = "gelu_new"


def gptneox(metadata: Metadata, config: Config) -> None:
    config["hidden_act"] = "gelu"
    config["use_parallel_residual"] = metadata.flag("gptneox.use_parallel_residual", True)
    config["attention_bias"] = _has_qkv_bias(metadata)


def gpt2(_metadata: Metadata, config: Config) -> None:
    del config["hidden_act"]
    config["activation_function"] = "gelu_new"


def starcoder(metadata: Metadata, config: Config) -> None:
    del config["hidden_act"]
    config["activation_function"] = "gelu_pytorch_tanh"
    config["multi_query"] = config["num_key_value_heads"] == 1


def olmo(metadata: Metadata, config: Config) -> None:
    """Norms have no weights, and one epsilon."""
    if config.pop("layer_norm_eps") != 1e-5:
        raise InputError(f"{metadata.path} has norms of another epsilon than 1e-5, which 'olmo' models have")
    if metadata.value("olmo.attention.clamp_kqv"):
        config["clip_qkv"] = metadata.number("attention.clamp_kqv")  # which the engine refuses


def falcon(metadata: Metadata, config: Config) -> None:
    del config["hidden_act"]
    config["activation"] = "gelu"
    # The 7B is one group of heads, after one norm.
    norms = 2 if "blk.0.attn_norm_2.weight" in metadata.tensors else 1
    config |= {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}
    config["num_kv_heads"] = config["num_key_value_heads"]
    config["bias"] = _has_qkv_bias(metadata)


def apertus(_metadata: Metadata, config: Config) -> None:
    config["hidden_act"] = "xielu"
    rope = config.pop("rope_scaling") or {"rope_type": "default"}  # absent, it would be the class's default
    config["rope_parameters"] = rope | {"rope_theta": config.pop("rope_theta")}


def xielu_tensors(metadata: Metadata, layers: int) -> dict[str, NDArray[np.float32]]:
    """The activation's parameters of each layer, which GGUF has as keys, under Hugging Face's names of tensors."""
    tensors = {}
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        for layer, value in enumerate(metadata.array(f"xielu.{name}", float, layers)):
            is_parameter = name.startswith("alpha")
            tensors[f"model.layers.{layer}.mlp.act_fn.{name}"] = np.array(
                [value] if is_parameter else value, np.float32
            )
    return tensors


def minicpm(metadata: Metadata, config: Config) -> None:
    """Granite's factors. Files without them are of MiniCPM 2B, which has 12, 1.4 / sqrt(layers) and hidden / 256."""
    if metadata.count("expert_count") > 1:
        raise InputError(f"{metadata.path} is a mixture of experts, which is not supported for 'minicpm'")
    config["embedding_multiplier"] = metadata.number("embedding_scale", 12.0)
    config["residual_multiplier"] = metadata.number("residual_scale", 1.4 / math.sqrt(config["num_hidden_layers"]))
    config["attention_multiplier"] = config["head_dim"] ** -0.5
    config["logits_scaling"] = metadata.number("logit_scale", config["hidden_size"] / 256)
    _longrope(metadata, config)
    if config["rope_scaling"] is not None and config["rope_scaling"]["rope_type"] == "longrope":
        config["rope_scaling"]["original_max_position_embeddings"] = metadata.size(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
