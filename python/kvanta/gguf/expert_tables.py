"""Lines of the tables in tensor_names.py that an architecture with experts has in addition to the common ones."""

from __future__ import annotations

EXAONE_MOE = """
exp_probs_b.bias  =mlp.e_score_correction_bias  E  moe
"""

ERNIE4_5_MOE = """
exp_probs_b.bias  =mlp.moe_statics.e_score_correction_bias  1,E  optional
ffn_gate_shexp    mlp.shared_experts.gate_proj              s,h  optional
ffn_up_shexp      mlp.shared_experts.up_proj                s,h  optional
ffn_down_shexp    mlp.shared_experts.down_proj              h,s  optional
"""

AFMOE = """
attn_gate            self_attn.gate_proj              q,h
post_attention_norm  post_attention_layernorm         h    norm
ffn_norm             pre_mlp_layernorm                h    norm
post_ffw_norm        post_mlp_layernorm               h    norm
ffn_gate_inp         mlp.router.gate                  E,h  moe
exp_probs_b.bias     =mlp.expert_bias                 E    moe
ffn_gate_shexp       mlp.shared_experts.gate_proj     s,h  optional
ffn_up_shexp         mlp.shared_experts.up_proj       s,h  optional
ffn_down_shexp       mlp.shared_experts.down_proj     h,s  optional
"""

# The MLPs' width is that of the experts and of the shared one.
HUNYUAN_MOE = """
ffn_norm        post_attention_layernorm  h      norm
ffn_gate_inp    mlp.gate.wg               E,h    moe
ffn_gate_shexp  mlp.shared_mlp.gate_proj  f,h    moe
ffn_up_shexp    mlp.shared_mlp.up_proj    f,h    moe
ffn_down_shexp  mlp.shared_mlp.down_proj  h,f    moe
"""

# Values have fewer channels than keys.
MIMO2 = """
attn_v               self_attn.v_proj                      kw,h  bias
attn_output          self_attn.o_proj                      h,om
attn_sinks.weight    =self_attn.attention_sink_bias        H     optional
exp_probs_b.bias     =mlp.gate.e_score_correction_bias     E     moe
"""

STEP35 = """
attn_gate         self_attn.g_proj             H,h
ffn_gate_inp      moe.gate                     E,h     moe
ffn_gate_up_exps  moe.experts.*.gate_proj|up_proj  E,2e,h  optional
ffn_gate_exps     moe.experts.*.gate_proj      E,e,h   moe
ffn_up_exps       moe.experts.*.up_proj        E,e,h   moe
ffn_down_exps     moe.experts.*.down_proj      E,h,e   moe
exp_probs_b.bias  =moe.router_bias             E       optional
ffn_gate_shexp    share_expert.gate_proj       s,h     moe
ffn_up_shexp      share_expert.up_proj         s,h     moe
ffn_down_shexp    share_expert.down_proj       h,s     moe
"""

PHIMOE = """
attn_norm.bias  =input_layernorm.bias            h
ffn_norm.bias   =post_attention_layernorm.bias   h
"""

# Norms over the whole width of q and k.
OLMOE = """
attn_q_norm    self_attn.q_norm           q   norm
attn_k_norm    self_attn.k_norm           k   norm
ffn_norm       post_attention_layernorm   h   norm
"""

MINIMAX_M2 = """
exp_probs_b.bias  =block_sparse_moe.e_score_correction_bias  E
attn_q_norm       self_attn.q_norm                           q   norm
attn_k_norm       self_attn.k_norm                           k   norm
"""

# The parts of matrices that Hugging Face fuses.
GRANITE_MOE = """
ffn_norm       post_attention_layernorm              h       norm
ffn_gate_inp   block_sparse_moe.router.layer         E,h     moe
ffn_gate_up_exps  block_sparse_moe.experts.*.gate_proj|up_proj  E,2f,h  optional
ffn_gate_exps  block_sparse_moe.experts.*.gate_proj  E,f,h   moe
ffn_up_exps    block_sparse_moe.experts.*.up_proj    E,f,h   moe
ffn_down_exps  block_sparse_moe.experts.*.down_proj  E,h,f   moe
"""

GRANITE_MOE_SHARED = """
ffn_gate_shexp  shared_mlp.gate_proj      s,h   moe
ffn_up_shexp    shared_mlp.up_proj        s,h   moe
ffn_down_shexp  shared_mlp.output_linear  h,s   moe
"""

# Experts in addition to the MLP, each with separate norms. Gate and up are one tensor in most files.
GEMMA4 = """
ffn_gate_inp          router.proj                   E,h      moe
ffn_gate_inp.scale    =router.scale                 h        moe
ffn_gate_up_exps      experts.*.gate_proj|up_proj   E,2e,h   optional
ffn_gate_exps         experts.*.gate_proj           E,e,h    moe
ffn_up_exps           experts.*.up_proj             E,e,h    moe
ffn_down_exps         experts.*.down_proj           E,h,e    moe
ffn_down_exps.scale   =router.per_expert_scale      E        moe
pre_ffw_norm_2        pre_feedforward_layernorm_2   h        norm moe
post_ffw_norm_1       post_feedforward_layernorm_1  h        norm moe
post_ffw_norm_2       post_feedforward_layernorm_2  h        norm moe
"""

# Layers that use the selection of an earlier one have none.
INDEXER = """
indexer.attn_q_b     self_attn.indexer.wq_b          iq,a   optional
indexer.attn_k       self_attn.indexer.wk            i,h    optional
indexer.proj         self_attn.indexer.weights_proj  iH,h   optional
indexer.k_norm       self_attn.indexer.k_norm        i      optional
indexer.k_norm.bias  =self_attn.indexer.k_norm.bias  i      optional
"""
