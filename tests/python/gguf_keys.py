"""Keys of GGUF files from config.json, as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

from typing import Any

import gguf
import gguf_dense
import gguf_gemma4
import gguf_hybrids
import gguf_kimi
import gguf_lfm2
import gguf_mamba2

_COUNTED = ("num_local", "num", "n_routed", "moe_num")  # keys of the number of experts
_SHARED = ("n_shared", "num_shared", "moe_num_shared")
_LAYER_NORM_EPS = {
    **dict.fromkeys(("cohere", "cohere2", "stablelm"), "layer_norm_eps"),
    "nemotron": "norm_eps",
    **gguf_dense.LAYER_NORM_EPS,
}
_USED = {
    "ernie4_5_moe": "moe_k",
    "gemma4_text": "top_k_experts",
    "hunyuan_v1_moe": "moe_topk",
}  # keys of the number of experts of a row


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    """Keys of all architectures, and of `arch`, a name of gguf.MODEL_ARCH."""
    get = config.get
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if arch != "STEP35":
        writer.add_head_count(config["num_attention_heads"])
    is_lfm2 = config["model_type"] in gguf_lfm2.MODEL_TYPES
    if is_lfm2:
        gguf_lfm2.add_config(writer, config)
    elif config["model_type"] in _LAYER_NORM_EPS:
        writer.add_layer_norm_eps(config[_LAYER_NORM_EPS[config["model_type"]]])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if arch == "GEMMA4":
        gguf_gemma4.add_config(writer, config)
    elif not is_lfm2:
        writer.add_feed_forward_length(get("intermediate_size_mlp") or config["intermediate_size"])
    if "kv_lora_rank" in config:
        _add_latents(writer, config)
    elif arch == "MIMO2":
        _add_mimo2(writer, config)
    elif arch == "STEP35":
        _add_step35(writer, config)
    elif arch != "GEMMA4" and not is_lfm2:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(int(head_dim * (get("rope_parameters") or {}).get("partial_rotary_factor", 1)))
    rope = get("rope_parameters") or {}
    if "sliding_attention" in rope:
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        stretch = rope.get("alpha", 1.0) ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(rope["rope_theta"] * stretch)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("mscale_all_dim") and arch in ("DEEPSEEK2", "MISTRAL4"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if get("sliding_window") and not (config["model_type"].startswith("qwen") and not get("use_sliding_window")):
        writer.add_sliding_window(config["sliding_window"])
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if get(key):
            getattr(writer, f"add_{key}")(config[key])
    if not is_lfm2:
        _add_experts(writer, config)
    if "mamba_n_heads" in config or "mamba_num_heads" in config:
        gguf_mamba2.add_config(writer, config)
    if "linear_num_key_heads" in config:
        gguf_hybrids.add_config(writer, config)
    if config["model_type"] == "kimi_linear":
        gguf_kimi.add_config(writer, config)
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if config["model_type"] in ("ministral3", "mistral4"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if config["model_type"].startswith("granite"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if config["model_type"] in ("olmo3", "exaone4", "exaone_moe", "cohere2", "gemma4_text", "afmoe"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _add_mimo2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    ropes = config["rope_parameters"]
    writer.add_head_count_kv([config["num_key_value_heads"] * (2 if window else 1) for window in windows])
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["v_head_dim"])
    writer.add_float32("mimo2.attention.value_scale", config["attention_value_scale"])
    writer.add_rope_dimension_count(int(config["head_dim"] * ropes["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])


def _add_step35(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    windows = [kind == "sliding_attention" for kind in config["layer_types"][:layers]]
    full, other = config["num_attention_heads"], config["attention_other_setting"]
    writer.add_head_count([other["num_attention_heads"] if window else full for window in windows])
    writer.add_head_count_kv([config["num_attention_groups"]] * layers)
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"][windows.index(False)])
    writer.add_rope_freq_base_swa(config["rope_theta"][windows.index(True)])
    writer.add_expert_used_count(config["moe_top_k"])
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_swiglu_clamp_exp([limit or 0.0 for limit in config["swiglu_limits"][:layers]])
    writer.add_swiglu_clamp_shexp([limit or 0.0 for limit in config["swiglu_limits_shared"][:layers]])


def _add_latents(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    if "index_topk" in config:
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
        if "indexer_types" in config:
            types = [kind == "full" for kind in config["indexer_types"]]
            writer.add_array(f"{writer.arch}.attention.indexer.types", types)


def _add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    get = config.get
    kind = config["model_type"]
    if kind == "step3p5":
        return  # _add_step35
    count = next((get(f"{key}_experts") for key in _COUNTED if get(f"{key}_experts")), 0)
    if not count or kind == "nemotron_h" or get("first_k_dense_replace", 0) >= config["num_hidden_layers"]:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config[_USED.get(kind, "num_experts_per_tok")])
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if kind == "afmoe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_weights_scale(config["route_scale"])
        writer.add_expert_weights_norm(True)
    if kind in ("gpt_oss", "llama4_text", "minimax_m2", "hunyuan_v1_moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if kind == "ernie4_5_moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    if get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    width = get("shared_expert_intermediate_size") or get("shared_intermediate_size")
    if width:
        writer.add_expert_shared_feed_forward_length(width)
    shared = next((get(f"{key}_experts") for key in _SHARED if get(f"{key}_experts")), 0)
    if shared:
        writer.add_expert_shared_count(shared)
    if "routed_scaling_factor" in config:
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(bool(get("norm_topk_prob")))
        writer.add_leading_dense_block_count(get("first_k_dense_replace", 1))
        softmax = kind in ("deepseek_v2", "mistral4")
        writer.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID
        )
        if get("n_group"):
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
