"""Tables of tensor_table.py of models whose other layers have a gated short convolution."""

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
