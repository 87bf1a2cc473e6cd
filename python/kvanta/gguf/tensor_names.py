"""The modules of an architecture in GGUF, and the sizes that config.json requires."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvanta.gguf.dense_tables import GPT2_TOP, PHI_TOP
from kvanta.gguf.layer_tables import BY_MODEL_TYPE, FINAL_NORMS, TOP, TOP_OF_LAYER_INPUTS
from kvanta.gguf.recurrent_tables import LFM2_TOP
from kvanta.gguf.tensor_table import Module, parse_table

BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias|scale))?")
# No weights: config.json has what they say.
DENSE = ("dense_2.weight", "dense_3.weight")  # of sentence-transformers, by the numbers of its folders
IGNORED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", *DENSE}


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


_MORE_AT_THE_TOP = {"gemma4_text": TOP_OF_LAYER_INPUTS, "gpt2": GPT2_TOP, "gpt_bigcode": GPT2_TOP, "phi": PHI_TOP}
QKV, QKV_PARTS = "attn_qkv", ("attn_q", "attn_k", "attn_v")


def modules_of(config: Mapping[str, Any]) -> dict[str, Module]:
    """The modules of a layer. Any file may have q, k and v in one matrix, as llama.cpp reads them."""
    two_norms = config.get("num_ln_in_parallel_attn") == 2
    modules = parse_table(BY_MODEL_TYPE["falcon, two norms" if two_norms else config["model_type"]])
    if QKV not in modules and all(part in modules for part in QKV_PARTS):
        first, *others = (modules[part] for part in QKV_PARTS)
        names = "|".join([first.name, *(each.name.rpartition(".")[2] for each in others)])
        rows = tuple(modules[part].shape[0] for part in QKV_PARTS)
        modules[QKV] = Module(names, ("qkv", first.shape[1]), first.words | {"optional"}, rows)
    return modules


def top_modules(model_type: str) -> dict[str, Module]:
    """The modules of no layer."""
    if model_type in ("lfm2", "lfm2_moe"):
        return parse_table(LFM2_TOP)
    if model_type == "olmo":  # norms have no weights
        return parse_table(TOP)
    norm = f"model.{FINAL_NORMS.get(model_type, 'norm')}"
    norms = f"output_norm {norm} h norm\noutput_norm.bias ={norm}.bias h optional\n"
    return parse_table(TOP + norms + _MORE_AT_THE_TOP.get(model_type, ""))


def sizes_by_layer(config: Mapping[str, Any]) -> list[dict[str, int]]:
    """`sizes` of each layer: heads and MLPs need not be those of all."""
    layers, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers", 0)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    by_layer = config.get("per_layer_config", {})
    kinds = config.get("layer_types") or [""] * layers
    result = []
    for layer in range(layers):
        width = config["intermediate_size"] * (wide if layer >= layers - shared else 1)
        own = {"intermediate_size": width, "layer_type": kinds[layer], **by_layer.get(str(layer), {})}
        result.append(sizes({**config, **own}))
    return result


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers that the letters in tables stand for."""
    get = config.get
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    nope, rope, rank = get("qk_nope_head_dim", 0), get("qk_rope_head_dim", 0), get("kv_lora_rank", 0)
    value = get("v_head_dim", 0)
    experts = next((get(key) for key in _EXPERT_COUNTS if get(key)), 0)
    expert = get("moe_intermediate_size") or config["intermediate_size"]
    shared = get("shared_expert_intermediate_size") or get("shared_intermediate_size")
    shared = shared or get("moe_shared_expert_intermediate_size") or get("share_expert_dim")
    shared = shared or sum(get(key, 0) for key in _SHARED_COUNTS) * expert
    q, k = heads * head_dim, config["num_key_value_heads"] * head_dim
    ffn = get("intermediate_size_mlp") or config["intermediate_size"]
    linear_heads = get("linear_num_value_heads") or get("linear_num_heads", 0)
    linear_dim = get("linear_value_head_dim") or get("linear_head_dim", 0)
    values = linear_heads * linear_dim
    is_linear = get("layer_type") == "linear_attention"
    mamba_heads = get("mamba_n_heads") or get("mamba_num_heads") or 0
    mamba_width = mamba_heads * (get("mamba_d_head") or get("mamba_head_dim") or 0)
    states = (get("mamba_n_groups") or get("n_groups") or 0) * (get("mamba_d_state") or get("ssm_state_size") or 0)
    channels = 2 * get("linear_num_key_heads", 0) * get("linear_key_head_dim", 0) + values
    return {
        "h": config["hidden_size"],
        "3h": 3 * config["hidden_size"],
        "v": config["vocab_size"],
        "P": config["max_position_embeddings"],
        "d": head_dim,
        "H": heads,
        "Hk": config["num_key_value_heads"],
        "q": q,
        "2q": 2 * q,
        "k": k,
        "kw": config["num_key_value_heads"] * value,
        "qkv": q + 2 * k,
        "f": ffn,
        "2f": 2 * ffn,
        "E": experts,
        "e": expert,
        "2e": 2 * expert,
        "l": get("moe_latent_size") or config["hidden_size"],
        "s": shared,
        "1": 1,
        "r": rank,
        "a": get("q_lora_rank") or 0,
        "n": nope,
        "w": value,
        "ra": rank + rope,
        "i": get("index_head_dim", 0),
        "iH": get("index_n_heads", 0),
        "iq": get("index_n_heads", 0) * get("index_head_dim", 0),
        "qm": heads * (nope + rope),
        "kvm": heads * (nope + value),
        "om": heads * value,
        "kq": values if is_linear else heads * (nope + rope),
        "ko": values if is_linear else heads * value,
        "lH": linear_heads,
        "2lH": 2 * linear_heads,
        "lw": linear_dim,
        "lv": values,
        "lc": channels,
        "lc+lv": channels + values,
        "lt": get("linear_conv_kernel_dim") or get("conv_L_cache", 0),
        "mH": mamba_heads,
        "mv": mamba_width,
        "mc": mamba_width + 2 * states,
        "mp": 2 * mamba_width + 2 * states + mamba_heads,
        "mt": get("mamba_d_conv") or get("conv_kernel") or 0,
        "p": get("hidden_size_per_layer_input") or 0,
        "Lp": config["num_hidden_layers"] * (get("hidden_size_per_layer_input") or 0),
    }
