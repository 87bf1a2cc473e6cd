"""GGUF's names of tensors, by architecture, with Hugging Face's names and the sizes that config.json asks for.

Tables are those of tensor_table.py. Sizes: see `sizes`; GGUF leaves out those of 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvanta.gguf_convert import expert_tables
from kvanta.gguf_convert.tensor_table import Module, parse_table

TOP = """
token_embd     model.embed_tokens   v,h
output_norm    model.norm           h     norm
output_norm.bias  =model.norm.bias  h     optional
output         lm_head              v,h   optional
"""

_ATTENTION = """
attn_norm      input_layernorm      h     norm
attn_q         self_attn.q_proj     q,h   bias
attn_k         self_attn.k_proj     k,h   bias
attn_v         self_attn.v_proj     k,h   bias
attn_output    self_attn.o_proj     h,q   bias
"""

_QK_NORM = """
attn_q_norm    self_attn.q_norm     d     norm
attn_k_norm    self_attn.k_norm     d     norm
"""

_MLP = """
ffn_norm       post_attention_layernorm  h     norm
ffn_gate       mlp.gate_proj             f,h   bias dense
ffn_up         mlp.up_proj               f,h   bias dense
ffn_down       mlp.down_proj             h,f   bias dense
"""

_EXPERTS = """
ffn_gate_inp   mlp.gate                     E,h     moe
ffn_gate_exps  mlp.experts.*.gate_proj      E,e,h   moe
ffn_up_exps    mlp.experts.*.up_proj        E,e,h   moe
ffn_down_exps  mlp.experts.*.down_proj      E,h,e   moe
"""

_SHARED_EXPERTS = """
exp_probs_b.bias  =mlp.gate.e_score_correction_bias  E    optional
ffn_gate_shexp    mlp.shared_experts.gate_proj       s,h  moe
ffn_up_shexp      mlp.shared_experts.up_proj         s,h  moe
ffn_down_shexp    mlp.shared_experts.down_proj       h,s  moe
"""

_LLAMA = _ATTENTION + _MLP

_MIXTRAL = (
    _ATTENTION
    + """
ffn_norm       post_attention_layernorm        h       norm
ffn_gate_inp   block_sparse_moe.gate           E,h     moe
ffn_gate_exps  block_sparse_moe.experts.*.w1   E,f,h   moe
ffn_up_exps    block_sparse_moe.experts.*.w3   E,f,h   moe
ffn_down_exps  block_sparse_moe.experts.*.w2   E,h,f   moe
"""
)

_QWEN2_MOE_MLP = (
    _EXPERTS
    + """
ffn_gate_inp_shexp  mlp.shared_expert_gate        1,h   moe
ffn_gate_shexp      mlp.shared_expert.gate_proj   s,h   moe
ffn_up_shexp        mlp.shared_expert.up_proj     s,h   moe
ffn_down_shexp      mlp.shared_expert.down_proj   h,s   moe
"""
)

_QWEN2_MOE = _LLAMA + _QWEN2_MOE_MLP

# attn_q has a gate after each head's q. Value heads may be in another order than Hugging Face's: families.py.
_HYBRID_ATTENTION = """
attn_norm            input_layernorm           h         norm
post_attention_norm  post_attention_layernorm  h         norm
attn_q               self_attn.q_proj          2q,h      attention
attn_k               self_attn.k_proj          k,h       attention
attn_v               self_attn.v_proj          k,h       attention
attn_output          self_attn.o_proj          h,q       attention
attn_q_norm          self_attn.q_norm          d         norm attention
attn_k_norm          self_attn.k_norm          d         norm attention
ssm_conv1d           linear_attn.conv1d        lc,1,lt   recurrent
ssm_dt.bias          =linear_attn.dt_bias      lH        recurrent
ssm_a.               =linear_attn.A            lH        recurrent
ssm_norm             linear_attn.norm          lw        recurrent
ssm_out              linear_attn.out_proj      h,lv      recurrent
attn_qkv             linear_attn.in_proj_qkv   lc,h      recurrent
attn_gate            linear_attn.in_proj_z     lv,h      recurrent
"""

# q, k, v and z are in one matrix in old files, by head of keys; newer ones have its parts.
_QWEN3_NEXT = (
    _QWEN2_MOE_MLP
    + _HYBRID_ATTENTION
    + """
attn_qkv   linear_attn.in_proj_qkv    lc,h     optional
attn_gate  linear_attn.in_proj_z      lv,h     optional
ssm_in     linear_attn.in_proj_qkvz   lc+lv,h  optional
ssm_ba     linear_attn.in_proj_ba     2lH,h    recurrent
"""
)

_QWEN3_5_ATTENTION = (
    _HYBRID_ATTENTION
    + """
ssm_beta   linear_attn.in_proj_b   lH,h   recurrent
ssm_alpha  linear_attn.in_proj_a   lH,h   recurrent
"""
)

_QWEN3_5 = (
    _QWEN3_5_ATTENTION
    + """
ffn_gate   mlp.gate_proj   f,h
ffn_up     mlp.up_proj     f,h
ffn_down   mlp.down_proj   h,f
"""
)

# Norms before and after both blocks.
_GEMMA = (
    _LLAMA
    + """
post_attention_norm  post_attention_layernorm    h   norm
ffn_norm             pre_feedforward_layernorm   h   norm
post_ffw_norm        post_feedforward_layernorm  h   norm
"""
)

_GPT_OSS = (
    _ATTENTION
    + """
attn_sinks.weight    =self_attn.sinks            H
post_attention_norm  post_attention_layernorm    h       norm
ffn_gate_inp         mlp.router                  E,h     bias
ffn_gate_exps        mlp.experts.*.gate_proj     E,e,h   bias
ffn_up_exps          mlp.experts.*.up_proj       E,e,h   bias
ffn_down_exps        mlp.experts.*.down_proj     E,h,e   bias
"""
)

# One matrix for gate and up, in Hugging Face's checkpoints, too.
_GATE_UP = """
ffn_norm       post_attention_layernorm  h      norm
ffn_up         mlp.gate_up_proj          2f,h
ffn_down       mlp.down_proj             h,f
"""

_PHI3 = (
    """
attn_norm      input_layernorm           h      norm
attn_qkv       self_attn.qkv_proj        qkv,h
attn_output    self_attn.o_proj          h,q
"""
    + _GATE_UP
)

_GLM4 = (
    _ATTENTION
    + _GATE_UP
    + """
post_attention_norm  post_self_attn_layernorm  h   norm
post_ffw_norm        post_mlp_layernorm        h   norm
"""
)

_GLM4_MOE = (
    _LLAMA
    + _EXPERTS
    + _SHARED_EXPERTS
    + """
ffn_norm             post_attention_layernorm  h   norm optional
post_attention_norm  post_attention_layernorm  h   norm optional
attn_q_norm          self_attn.q_norm          d   norm optional
attn_k_norm          self_attn.k_norm          d   norm optional
"""
)

_LLAMA4 = (
    _ATTENTION
    + """
ffn_norm        post_attention_layernorm            h       norm
ffn_gate        feed_forward.gate_proj              f,h     dense
ffn_up          feed_forward.up_proj                f,h     dense
ffn_down        feed_forward.down_proj              h,f     dense
ffn_gate_inp    feed_forward.router                 E,h     moe
ffn_gate_exps   feed_forward.experts.*.gate_proj    E,e,h   moe
ffn_up_exps     feed_forward.experts.*.up_proj      E,e,h   moe
ffn_down_exps   feed_forward.experts.*.down_proj    E,h,e   moe
ffn_gate_shexp  feed_forward.shared_expert.gate_proj  s,h   moe
ffn_up_shexp    feed_forward.shared_expert.up_proj    s,h   moe
ffn_down_shexp  feed_forward.shared_expert.down_proj  h,s   moe
"""
)

# Norms after both blocks, and over the whole width of q and k.
_OLMO2 = """
attn_q               self_attn.q_proj            q,h
attn_k               self_attn.k_proj            k,h
attn_v               self_attn.v_proj            k,h
attn_output          self_attn.o_proj            h,q
attn_q_norm          self_attn.q_norm            q   norm
attn_k_norm          self_attn.k_norm            k   norm
post_attention_norm  post_attention_layernorm    h   norm
ffn_gate             mlp.gate_proj               f,h
ffn_up               mlp.up_proj                 f,h
ffn_down             mlp.down_proj               h,f
post_ffw_norm        post_feedforward_layernorm  h   norm
"""

# The norm before the MLP has the name of one after the attention.
_SEED_OSS = (
    _ATTENTION
    + """
post_attention_norm  post_attention_layernorm  h     norm
ffn_gate             mlp.gate_proj             f,h   bias
ffn_up               mlp.up_proj               f,h   bias
ffn_down             mlp.down_proj             h,f   bias
"""
)

_HUNYUAN = (
    _LLAMA
    + """
attn_q_norm    self_attn.query_layernorm   d   norm
attn_k_norm    self_attn.key_layernorm     d   norm
"""
)

_COHERE = (
    _ATTENTION
    + """
attn_q_norm    self_attn.q_norm   H,d    norm optional
attn_k_norm    self_attn.k_norm   Hk,d   norm optional
ffn_gate       mlp.gate_proj      f,h
ffn_up         mlp.up_proj        f,h
ffn_down       mlp.down_proj      h,f
"""
)

_ARCEE = (
    _ATTENTION
    + """
ffn_norm       post_attention_layernorm  h     norm
ffn_up         mlp.up_proj               f,h   bias
ffn_down       mlp.down_proj             h,f   bias
"""
)

_NEMOTRON = (
    _ARCEE
    + """
attn_norm.bias  =input_layernorm.bias            h
ffn_norm.bias   =post_attention_layernorm.bias   h
"""
)

_STABLELM = (
    _LLAMA
    + """
attn_norm.bias  =input_layernorm.bias            h
ffn_norm        post_attention_layernorm         h   norm optional
ffn_norm.bias   =post_attention_layernorm.bias   h   optional
"""
)

# kv_b is whole in old files; newer ones have its parts, k_b transposed, by head.
_DEEPSEEK2 = (
    _MLP
    + _EXPERTS
    + _SHARED_EXPERTS
    + """
attn_norm       input_layernorm                h      norm
attn_q          self_attn.q_proj               qm,h   optional
attn_q_a        self_attn.q_a_proj             a,h    optional
attn_q_a_norm   self_attn.q_a_layernorm        a      norm optional
attn_q_b        self_attn.q_b_proj             qm,a   optional
attn_kv_a_mqa   self_attn.kv_a_proj_with_mqa   ra,h
attn_kv_a_norm  self_attn.kv_a_layernorm       r      norm
attn_kv_b       self_attn.kv_b_proj            kvm,r  optional
attn_k_b        self_attn.k_b_proj.*           H,r,n  optional
attn_v_b        self_attn.v_b_proj.*           H,w,r  optional
attn_output     self_attn.o_proj               h,om
"""
)

_BY_MODEL_TYPE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "granite", "smollm3", "ministral3", "gemma", "ernie4_5"), _LLAMA),
    "mixtral": _MIXTRAL,
    "qwen3": _LLAMA + _QK_NORM,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _LLAMA + _QK_NORM + _EXPERTS,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_ATTENTION + _QWEN2_MOE_MLP,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA + _QK_NORM,
    "gpt_oss": _GPT_OSS,
    "phi3": _PHI3,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "dots1": _LLAMA + _QK_NORM + _EXPERTS + _SHARED_EXPERTS,
    "exaone_moe": _LLAMA + _QK_NORM + _EXPERTS + _SHARED_EXPERTS + expert_tables.EXAONE_MOE,
    "ernie4_5_moe": _LLAMA + _EXPERTS + expert_tables.ERNIE4_5_MOE,
    "olmoe": _ATTENTION + _EXPERTS + expert_tables.OLMOE,
    "minimax_m2": _MIXTRAL + expert_tables.MINIMAX_M2,
    "granitemoe": _ATTENTION + expert_tables.GRANITE_MOE,
    "granitemoeshared": _ATTENTION + expert_tables.GRANITE_MOE + expert_tables.GRANITE_MOE_SHARED,
    "llama4_text": _LLAMA4,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "seed_oss": _SEED_OSS,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "arcee": _ARCEE,
    "nemotron": _NEMOTRON,
    "stablelm": _STABLELM,
    "exaone4": _OLMO2 + _QK_NORM,
    "hunyuan_v1_dense": _HUNYUAN,
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK2,
    "kimi_k2": _DEEPSEEK2,
}
# GGUF architectures whose conversion orders the rows of q and k for RoPE of the pairs (2 i, 2 i + 1).
PAIRED_ROPE = {"llama", "mistral", "granite", "granitemoe", "smollm3", "mistral3", "arcee"}
# Model types whose norm weights are stored plus one in GGUF.
NORMS_PLUS_ONE = {"gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron"}

BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")
# No weights: config.json has what they say.
IGNORED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def modules_of(model_type: str) -> dict[str, Module]:
    """The modules of a layer."""
    return parse_table(_BY_MODEL_TYPE[model_type])


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The numbers that the letters in tables stand for."""
    get = config.get
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    nope, rope, rank = get("qk_nope_head_dim", 0), get("qk_rope_head_dim", 0), get("kv_lora_rank", 0)
    value = get("v_head_dim", 0)
    experts = next((get(key) for key in _EXPERT_COUNTS if get(key)), 0)
    expert = get("moe_intermediate_size") or config["intermediate_size"]
    shared = get("shared_expert_intermediate_size") or get("shared_intermediate_size")
    shared = shared or sum(get(key, 0) for key in _SHARED_COUNTS) * expert
    q, k = heads * head_dim, config["num_key_value_heads"] * head_dim
    ffn = get("intermediate_size_mlp") or config["intermediate_size"]
    linear_heads, linear_dim = get("linear_num_value_heads", 0), get("linear_value_head_dim", 0)
    values = linear_heads * linear_dim
    channels = 2 * get("linear_num_key_heads", 0) * get("linear_key_head_dim", 0) + values
    return {
        "h": config["hidden_size"],
        "v": config["vocab_size"],
        "d": head_dim,
        "H": heads,
        "Hk": config["num_key_value_heads"],
        "q": q,
        "2q": 2 * q,
        "k": k,
        "qkv": q + 2 * k,
        "f": ffn,
        "2f": 2 * ffn,
        "E": experts,
        "e": expert,
        "s": shared,
        "1": 1,
        "r": rank,
        "a": get("q_lora_rank") or 0,
        "n": nope,
        "w": value,
        "ra": rank + rope,
        "qm": heads * (nope + rope),
        "kvm": heads * (nope + value),
        "om": heads * value,
        "lH": linear_heads,
        "2lH": 2 * linear_heads,
        "lw": linear_dim,
        "lv": values,
        "lc": channels,
        "lc+lv": channels + values,
        "lt": get("linear_conv_kernel_dim", 0),
    }
