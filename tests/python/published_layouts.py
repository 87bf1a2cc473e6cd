"""Checkpoints in the layouts of classes that transformers lacks, from those of a class of the same arithmetic.

The layouts are those of the code next to the weights: internlm/internlm2-chat-7b, openbmb/MiniCPM-2B-sft-bf16,
THUDM/glm-4-9b-chat, stepfun-ai/Step-3.5-Flash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A class of the hub, and the one of transformers that it is compared with."""

    class_name: str
    base: str
    config: Callable[[Config], Config]
    names: tuple[tuple[str, str], ...]
    """Parts of names, transformers' and the layout's."""
    join: Callable[[Config, list[torch.Tensor]], torch.Tensor] | None = None
    """q, k and v as one matrix, or vector; None: they are apart."""
    split: Callable[[Config, torch.Tensor], list[torch.Tensor]] | None = None
    fused: str = ""
    """The module of q, k and v."""


def _internlm2_config(config: Config) -> Config:
    own = {key: value for key, value in config.items() if key not in ("attention_bias", "mlp_bias")}
    return own | {"model_type": "internlm2", "bias": config["attention_bias"]}


def _by_kv_head(config: Config, parts: list[torch.Tensor]) -> torch.Tensor:
    heads = config["num_key_value_heads"]
    return torch.cat([part.reshape(heads, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def _from_kv_heads(config: Config, fused: torch.Tensor) -> list[torch.Tensor]:
    head, heads = config["head_dim"], config["num_key_value_heads"]
    rows = [config["num_attention_heads"] // heads * head, head, head]
    return [part.flatten(0, 1) for part in fused.reshape(heads, sum(rows), *fused.shape[1:]).split(rows, 1)]


def _minicpm_config(config: Config) -> Config:
    removed = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    own = {key: value for key, value in config.items() if key not in removed and "expert" not in key}
    return own | {
        "model_type": "minicpm",
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": config["residual_multiplier"] * math.sqrt(config["num_hidden_layers"]),
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
    }


CHATGLM_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "head_dim": "kv_channels",
    "num_key_value_heads": "multi_query_group_num",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
    "attention_bias": "add_qkv_bias",
}


def _chatglm_config(config: Config) -> Config:
    """The base of the rotation as a multiple of 10,000."""
    removed = ("hidden_act", "rope_parameters")
    own = {CHATGLM_KEYS.get(key, key): value for key, value in config.items() if key not in removed}
    return own | {
        "model_type": "chatglm",
        "rope_ratio": config["rope_parameters"]["rope_theta"] / 10000,
        "original_rope": True,
        "rmsnorm": True,
        "multi_query_attention": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
    }


# Keys of StepFun's own config.
STEP_KEYS = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
}
_PREDICTED = 3


def _step_config(config: Config) -> Config:
    """The language model's alone, with lists that have layers that predict further tokens."""
    text = config["text_config"]
    kept = ("per_layer_config", "num_sliding_attention_heads", "rope_parameters", "mlp_layer_types", "dtype")
    own = {STEP_KEYS.get(key, key): value for key, value in text.items() if key not in kept}
    ropes, layers = text["rope_parameters"], text["layer_types"]
    full = dict(ropes["full_attention"])
    own["rope_theta"] = [ropes[kind]["rope_theta"] for kind in layers] + [1e4] * _PREDICTED
    factors = [ropes[kind].get("partial_rotary_factor", 1.0) for kind in layers]
    own["partial_rotary_factors"] = factors + [1.0] * _PREDICTED
    if full["rope_type"] != "default":
        own["rope_scaling"] = {key: full[key] for key in full if key not in ("rope_theta", "partial_rotary_factor")}
        own["yarn_only_types"] = ["full_attention"]
    own["layer_types"] = layers + ["sliding_attention"] * _PREDICTED
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        own[key] = (text[key] or [None] * len(layers)) + [0.0] * _PREDICTED
    own["moe_layers_enum"] = ",".join(str(i) for i, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse")
    heads = {"num_attention_heads": text["num_sliding_attention_heads"], "head_dim": text["head_dim"]}
    own["attention_other_setting"] = {
        **heads,
        "attention_type": "sliding_attention",
        "num_attention_groups": text["num_key_value_heads"],
    }
    return own | {
        "model_type": "step3p5",
        "torch_dtype": config.get("dtype", "bfloat16"),
        "num_nextn_predict_layers": _PREDICTED,
        "use_moe_router_bias": True,
        "moe_router_activation": "sigmoid",
        "use_head_wise_attn_gate": True,
        "use_rope_layers": [],
        "zero_centered": True,
        "sink": False,
    }


def _concatenated(_config: Config, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts)


def _from_concatenated(config: Config, fused: torch.Tensor) -> list[torch.Tensor]:
    head = config["head_dim"]
    rows = [config[key] * head for key in ("num_attention_heads", "num_key_value_heads", "num_key_value_heads")]
    return list(fused.split(rows))


LAYOUTS = {
    "InternLM2": Layout(
        "InternLM2ForCausalLM",
        "Llama",
        _internlm2_config,
        (
            ("model.embed_tokens", "model.tok_embeddings"),
            ("lm_head", "output"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("self_attn.o_proj", "attention.wo"),
        ),
        _by_kv_head,
        _from_kv_heads,
        "attention.wqkv",
    ),
    "Step3p5": Layout("Step3p5ForCausalLM", "Step3p7", _step_config, ()),
    "MiniCPM": Layout("MiniCPMForCausalLM", "Granite", _minicpm_config, ()),
    "ChatGLM": Layout(
        "ChatGLMForConditionalGeneration",
        "Glm",
        _chatglm_config,
        (
            ("model.embed_tokens", "transformer.embedding.word_embeddings"),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("model.layers", "transformer.encoder.layers"),
            ("lm_head", "transformer.output_layer"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
        _concatenated,
        _from_concatenated,
        "self_attention.query_key_value",
    ),
}
BASE_CONFIG = "base_config.json"
"""transformers' config.json, kept to go back."""
_QKV = ("q_proj", "k_proj", "v_proj")


def _renamed(name: str, pairs: list[tuple[str, str]]) -> str:
    for old, new in pairs:
        if old in name:
            name = name.replace(old, new)
    return name


def publish_config(folder: Path, name: str) -> Config:
    """Rewrites config.json of the layout's base; returns what it was."""
    layout = LAYOUTS[name]
    config: Config = json.loads((folder / "config.json").read_text())
    if "hidden_size" in config:
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    (folder / BASE_CONFIG).write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(layout.config(config) | {"architectures": [layout.class_name]}))
    return config


def publish(folder: Path, name: str) -> None:
    """Rewrites a checkpoint of the layout's base."""
    layout, file = LAYOUTS[name], folder / "model.safetensors"
    config = publish_config(folder, name)
    tensors, stored = safetensors.torch.load_file(file), Tensors()
    for tensor_name, tensor in tensors.items():
        if layout.join and ".q_proj." in tensor_name:
            parts = [tensors[tensor_name.replace("q_proj", part)] for part in _QKV]
            fused = tensor_name.replace("self_attn.q_proj", layout.fused)
            stored[_renamed(fused, list(layout.names))] = layout.join(config, parts).contiguous()
        elif not layout.join or not any(f".{part}." in tensor_name for part in _QKV):
            stored[_renamed(tensor_name, list(layout.names))] = tensor
    safetensors.torch.save_file(stored, file, metadata={"format": "pt"})


def unpublish(folder: Path, name: str) -> None:
    """Undoes publish()."""
    layout, file = LAYOUTS[name], folder / "model.safetensors"
    config = json.loads((folder / BASE_CONFIG).read_text())
    (folder / "config.json").write_text(json.dumps(config))
    back, tensors = [(new, old) for old, new in layout.names], Tensors()
    for tensor_name, tensor in safetensors.torch.load_file(file).items():
        restored = _renamed(tensor_name, back)
        if layout.split and layout.fused in restored:
            for part, values in zip(_QKV, layout.split(config, tensor), strict=True):
                tensors[restored.replace(layout.fused, f"self_attn.{part}")] = values.contiguous()
        else:
            tensors[restored] = tensor
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def layout_of(class_name: str) -> str:
    """The name of a class's layout; "" for classes of transformers."""
    return next((name for name, layout in LAYOUTS.items() if layout.class_name == class_name), "")
