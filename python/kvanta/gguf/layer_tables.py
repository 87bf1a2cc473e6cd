"""GGUF's names of tensors, by model type, with Hugging Face's names and sizes: tables of tensor_table.py.

The letters of sizes are those of `tensor_names.sizes`; GGUF leaves out sizes of 1.
"""

from __future__ import annotations

from kvanta.gguf import dense_tables, expert_tables, mamba2_tables, recurrent_tables

TOP = """
token_embd     model.embed_tokens   v,h
output         lm_head              v,h   optional
output.bias    =lm_head.bias        v     optional
"""

# Names of the last norm that differ, by model type.
FINAL_NORMS = {
    "bamba": "final_layernorm",
    "falcon_h1": "final_layernorm",
    "nemotron_h": "norm_f",
    "phi": "final_layernorm",
    "gpt_neox": "final_layer_norm",
    "gpt2": "ln_f",
    "gpt_bigcode": "ln_f",
    "falcon": "ln_f",
}

TOP_OF_LAYER_INPUTS = """
per_layer_token_embd   model.embed_tokens_per_layer      v,Lp   layer_inputs
per_layer_model_proj   model.per_layer_model_projection  Lp,h   layer_inputs
per_layer_proj_norm    model.per_layer_projection_norm   p      norm layer_inputs
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

_MLP_MATRICES = """
ffn_gate       mlp.gate_proj             f,h
ffn_up         mlp.up_proj               f,h
ffn_down       mlp.down_proj             h,f
"""

_EXPERTS = """
ffn_gate_inp   mlp.gate                     E,h     moe
ffn_gate_up_exps  mlp.experts.*.gate_proj|up_proj  E,2e,h  optional
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
ffn_gate_up_exps  block_sparse_moe.experts.*.w1|w3  E,2f,h  optional
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

_QWEN3_5 = _QWEN3_5_ATTENTION + _MLP_MATRICES

# Norms before and after both blocks.
_GEMMA = (
    _LLAMA
    + """
post_attention_norm  post_attention_layernorm    h   norm
ffn_norm             pre_feedforward_layernorm   h   norm
post_ffw_norm        post_feedforward_layernorm  h   norm
"""
)

# Layers may lack K and V, or V alone.
_GEMMA4 = (
    expert_tables.GEMMA4
    + _MLP_MATRICES
    + """
attn_norm            input_layernorm             h     norm
attn_q               self_attn.q_proj            q,h   bias
attn_k               self_attn.k_proj            k,h   bias k
attn_v               self_attn.v_proj            k,h   bias v
attn_output          self_attn.o_proj            h,q   bias
attn_q_norm          self_attn.q_norm            d     norm
attn_k_norm          self_attn.k_norm            d     norm k
post_attention_norm  post_attention_layernorm    h     norm
ffn_norm             pre_feedforward_layernorm   h     norm
post_ffw_norm        post_feedforward_layernorm  h     norm
layer_output_scale.weight  =layer_scalar         1
inp_gate             per_layer_input_gate        p,h   layer_inputs
proj                 per_layer_projection        h,p   layer_inputs
post_norm            post_per_layer_input_norm   h     norm layer_inputs
"""
)

_GPT_OSS = (
    _ATTENTION
    + """
attn_sinks.weight    =self_attn.sinks            H
post_attention_norm  post_attention_layernorm    h       norm
ffn_gate_inp         mlp.router                  E,h     bias
ffn_gate_up_exps  mlp.experts.*.gate_proj|up_proj  E,2e,h  optional
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
ffn_gate_up_exps  feed_forward.experts.*.gate_proj|up_proj  E,2e,h  optional
ffn_gate_exps   feed_forward.experts.*.gate_proj    E,e,h   moe
ffn_up_exps     feed_forward.experts.*.up_proj      E,e,h   moe
ffn_down_exps   feed_forward.experts.*.down_proj    E,h,e   moe
ffn_gate_shexp  feed_forward.shared_expert.gate_proj  s,h   moe
ffn_up_shexp    feed_forward.shared_expert.up_proj    s,h   moe
ffn_down_shexp  feed_forward.shared_expert.down_proj  h,s   moe
"""
)

# Norms after both blocks, and over the whole width of q and k.
_OLMO2 = (
    _MLP_MATRICES
    + """
attn_q               self_attn.q_proj            q,h
attn_k               self_attn.k_proj            k,h
attn_v               self_attn.v_proj            k,h
attn_output          self_attn.o_proj            h,q
attn_q_norm          self_attn.q_norm            q   norm
attn_k_norm          self_attn.k_norm            k   norm
post_attention_norm  post_attention_layernorm    h   norm
post_ffw_norm        post_feedforward_layernorm  h   norm
"""
)

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

_HUNYUAN_NORMS = """
attn_q_norm    self_attn.query_layernorm   d   norm
attn_k_norm    self_attn.key_layernorm     d   norm
"""

_COHERE = (
    _ATTENTION
    + _MLP_MATRICES
    + """
attn_q_norm    self_attn.q_norm   H,d    norm optional
attn_k_norm    self_attn.k_norm   Hk,d   norm optional
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

BY_MODEL_TYPE = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "granite", "smollm3", "ministral3", "gemma", "ernie4_5"), _LLAMA),
    "mixtral": _MIXTRAL,
    "qwen3": _LLAMA + _QK_NORM,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3_moe": _LLAMA + _QK_NORM + _EXPERTS,
    "qwen3_next": _QWEN3_NEXT,
    "lfm2": recurrent_tables.LFM2,
    "lfm2_moe": recurrent_tables.LFM2_MOE,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_ATTENTION + _QWEN2_MOE_MLP,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA + _QK_NORM,
    "gemma4_text": _GEMMA4,
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
    "granitemoehybrid": expert_tables.GRANITE_MOE + expert_tables.GRANITE_MOE_SHARED + mamba2_tables.GRANITE_HYBRID,
    "bamba": mamba2_tables.BAMBA,
    "falcon_h1": mamba2_tables.FALCON_H1,
    "nemotron_h": mamba2_tables.NEMOTRON_H,
    "llama4_text": _LLAMA4,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "seed_oss": _SEED_OSS,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "arcee": _ARCEE,
    **dict.fromkeys(("nemotron", "jais2"), _NEMOTRON),
    "stablelm": _STABLELM,
    "exaone4": _OLMO2 + _QK_NORM,
    "hunyuan_v1_dense": _LLAMA + _HUNYUAN_NORMS,
    "hunyuan_v1_moe": _ATTENTION + _HUNYUAN_NORMS + _EXPERTS + expert_tables.HUNYUAN_MOE,
    "afmoe": _LLAMA + _QK_NORM + _EXPERTS + expert_tables.AFMOE,
    "mimo_v2_flash": _LLAMA + _EXPERTS + expert_tables.MIMO2,
    "step3p5": _LLAMA + _QK_NORM + expert_tables.STEP35,
    "phimoe": _MIXTRAL + expert_tables.PHIMOE,
    "mistral4": _DEEPSEEK2,
    "starcoder2": dense_tables.STARCODER2,
    "phi": dense_tables.PHI,
    "gpt_neox": dense_tables.GPT_NEOX,
    **dict.fromkeys(("gpt2", "gpt_bigcode"), dense_tables.GPT2),
    "olmo": dense_tables.OLMO,
    "falcon": dense_tables.FALCON,
    "falcon, two norms": dense_tables.FALCON_TWO_NORMS,
    "apertus": dense_tables.APERTUS,
    "glm": dense_tables.CHATGLM,
    "deepseek_v2": _DEEPSEEK2,
    "deepseek_v3": _DEEPSEEK2,
    "kimi_k2": _DEEPSEEK2,
    "deepseek_v32": _DEEPSEEK2 + expert_tables.INDEXER,
    "glm_moe_dsa": _DEEPSEEK2 + expert_tables.INDEXER,
    "kimi_linear": _MLP + _EXPERTS + _SHARED_EXPERTS + recurrent_tables.KIMI_LINEAR,
}
# GGUF architectures whose conversion orders the rows of q and k for RoPE of the pairs (2 i, 2 i + 1).
PAIRED_ROPE = {
    *("llama", "mistral", "granite", "granitemoe", "smollm3", "mistral3", "arcee", "internlm2", "minicpm"),
    "olmo",
}
# Model types whose norm weights are stored plus one in GGUF.
NORMS_PLUS_ONE = {
    *("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron"),
    "step3p5",
}
