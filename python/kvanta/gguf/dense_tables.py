"""Tables of tensor_table.py of GPT-2, OLMo, GPT-NeoX, Phi-2, StarCoder2, Falcon, Apertus and ChatGLM."""

from __future__ import annotations

_LAYER_NORMS = """
attn_norm.bias  =input_layernorm.bias            h
ffn_norm.bias   =post_attention_layernorm.bias   h
"""

STARCODER2 = (
    _LAYER_NORMS
    + """
attn_norm      input_layernorm           h     norm
attn_q         self_attn.q_proj          q,h   bias
attn_k         self_attn.k_proj          k,h   bias
attn_v         self_attn.v_proj          k,h   bias
attn_output    self_attn.o_proj          h,q   bias
ffn_norm       post_attention_layernorm  h     norm
ffn_up         mlp.c_fc                  f,h   bias
ffn_down       mlp.c_proj                h,f   bias
"""
)

PHI = """
attn_norm.bias  =input_layernorm.bias  h
attn_norm      input_layernorm   h     norm
attn_q         self_attn.q_proj  q,h   bias
attn_k         self_attn.k_proj  k,h   bias
attn_v         self_attn.v_proj  k,h   bias
attn_output    self_attn.dense   h,q   bias
ffn_up         mlp.fc1           f,h   bias
ffn_down       mlp.fc2           h,f   bias
"""

_DENSE_MLP = """
ffn_up         mlp.dense_h_to_4h  f,h   bias
ffn_down       mlp.dense_4h_to_h  h,f   bias
"""

GPT_NEOX = (
    _LAYER_NORMS
    + _DENSE_MLP
    + """
attn_norm      input_layernorm           h     norm
attn_q         attention.q_proj          q,h   bias
attn_k         attention.k_proj          k,h   bias
attn_v         attention.v_proj          k,h   bias
attn_output    attention.dense           h,q   bias
ffn_norm       post_attention_layernorm  h     norm
"""
)

_FALCON = (
    _DENSE_MLP
    + """
attn_q         self_attention.q_proj  q,h   bias
attn_k         self_attention.k_proj  k,h   bias
attn_v         self_attention.v_proj  k,h   bias
attn_output    self_attention.dense   h,q   bias
"""
)

FALCON = (
    _FALCON
    + """
attn_norm.bias  =input_layernorm.bias  h
attn_norm       input_layernorm        h   norm
"""
)

# The 40B, whose blocks have a norm each.
FALCON_TWO_NORMS = (
    _FALCON
    + """
attn_norm.bias    =ln_mlp.bias   h
attn_norm         ln_mlp         h   norm
attn_norm_2.bias  =ln_attn.bias  h
attn_norm_2       ln_attn        h   norm
"""
)

GPT2 = """
attn_norm.bias  =ln_1.bias   h
ffn_norm.bias   =ln_2.bias   h
attn_norm      ln_1          h     norm
attn_q         attn.q_proj   q,h   bias
attn_k         attn.k_proj   k,h   bias
attn_v         attn.v_proj   k,h   bias
attn_output    attn.c_proj   h,q   bias
ffn_norm       ln_2          h     norm
ffn_up         mlp.c_fc      f,h   bias
ffn_down       mlp.c_proj    h,f   bias
"""

GPT2_TOP = """
position_embd  model.wpe  P,h
"""

# Norms have no weights.
OLMO = """
attn_q         self_attn.q_proj   q,h   bias
attn_k         self_attn.k_proj   k,h   bias
attn_v         self_attn.v_proj   k,h   bias
attn_output    self_attn.o_proj   h,q   bias
ffn_gate       mlp.gate_proj      f,h
ffn_up         mlp.up_proj        f,h
ffn_down       mlp.down_proj      h,f
"""

PHI_TOP = """
output.bias  =lm_head.bias  v
"""

APERTUS = """
attn_norm      attention_layernorm    h     norm
attn_q         self_attn.q_proj       q,h   bias
attn_k         self_attn.k_proj       k,h   bias
attn_v         self_attn.v_proj       k,h   bias
attn_output    self_attn.o_proj       h,q   bias
attn_q_norm    self_attn.q_norm       d     norm
attn_k_norm    self_attn.k_norm       d     norm
ffn_norm       feedforward_layernorm  h     norm
ffn_up         mlp.up_proj            f,h
ffn_down       mlp.down_proj          h,f
"""

CHATGLM = """
attn_norm      input_layernorm           h     norm
attn_q         self_attn.q_proj          q,h   bias
attn_k         self_attn.k_proj          k,h   bias
attn_v         self_attn.v_proj          k,h   bias
attn_output    self_attn.o_proj          h,q   bias
ffn_norm       post_attention_layernorm  h     norm
ffn_up         mlp.gate_up_proj          2f,h
ffn_down       mlp.down_proj             h,f
"""
