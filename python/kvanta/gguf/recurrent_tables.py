"""Tables of tensor_table.py of models whose other layers have a gated short convolution, or Kimi Delta Attention."""

from __future__ import annotations

LFM2_TOP = """
token_embd       model.embed_tokens     v,h
token_embd_norm  model.embedding_norm   h     norm
output           lm_head                v,h   optional
"""

LFM2 = """
attn_norm           operator_norm           h       norm
attn_q              self_attn.q_proj        q,h     attention
attn_k              self_attn.k_proj        k,h     attention
attn_v              self_attn.v_proj        k,h     attention
attn_output         self_attn.out_proj      h,q     attention
attn_q_norm         self_attn.q_layernorm   d       norm attention
attn_k_norm         self_attn.k_layernorm   d       norm attention
shortconv.conv      conv.conv               h,1,lt  recurrent
shortconv.in_proj   conv.in_proj            3h,h    recurrent
shortconv.out_proj  conv.out_proj           h,h     recurrent
ffn_norm            ffn_norm                h       norm
ffn_gate            feed_forward.w1         f,h     dense
ffn_up              feed_forward.w3         f,h     dense
ffn_down            feed_forward.w2         h,f     dense
"""

LFM2_MOE = (
    LFM2
    + """
ffn_gate_inp      feed_forward.gate           E,h     moe
ffn_gate_exps     feed_forward.experts.*.w1   E,e,h   moe
ffn_up_exps       feed_forward.experts.*.w3   E,e,h   moe
ffn_down_exps     feed_forward.experts.*.w2   E,h,e   moe
exp_probs_b.bias  =feed_forward.expert_bias   E       optional
"""
)

# "kq" and "ko" are those of the layer's kind.
KIMI_LINEAR = """
attn_norm       input_layernorm               h        norm
attn_q          self_attn.q_proj              kq,h     optional
attn_k          self_attn.k_proj              lv,h     recurrent
attn_v          self_attn.v_proj              lv,h     recurrent
attn_output     self_attn.o_proj              h,ko
ssm_conv1d_q    self_attn.q_conv1d            lv,1,lt  flat recurrent
ssm_conv1d_k    self_attn.k_conv1d            lv,1,lt  flat recurrent
ssm_conv1d_v    self_attn.v_conv1d            lv,1,lt  flat recurrent
ssm_f_a         self_attn.f_a_proj            lw,h     recurrent
ssm_f_b         self_attn.f_b_proj            lv,lw    recurrent
ssm_g_a         self_attn.g_a_proj            lw,h     recurrent
ssm_g_b         self_attn.g_b_proj            lv,lw    recurrent
ssm_beta        self_attn.b_proj              lH,h     recurrent
ssm_a.          =self_attn.A                  lH       flat recurrent
ssm_dt.bias     =self_attn.dt_bias            lv       recurrent
ssm_norm        self_attn.o_norm              lw       recurrent
attn_q_a        self_attn.q_a_proj            a,h      optional
attn_q_a_norm   self_attn.q_a_layernorm       a        norm optional
attn_q_b        self_attn.q_b_proj            qm,a     optional
attn_kv_a_mqa   self_attn.kv_a_proj_with_mqa  ra,h     attention
attn_kv_a_norm  self_attn.kv_a_layernorm      r        norm attention
attn_kv_b       self_attn.kv_b_proj           kvm,r    optional
attn_k_b        self_attn.k_b_proj.*          H,r,n    optional
attn_v_b        self_attn.v_b_proj.*          H,w,r    optional
"""
