"""Lines of the tables in layer_tables.py for layers of Mamba-2."""

from __future__ import annotations


def mamba2_table(module: str, words: str = "") -> str:
    """A layer's Mamba-2, `module` in Hugging Face's checkpoints. GGUF has its vectors as matrices."""
    return f"""
ssm_in           {module}.in_proj       mp,h     {words}
ssm_conv1d       {module}.conv1d        mc,1,mt  {words}
ssm_conv1d.bias  ={module}.conv1d.bias  mc       optional
ssm_dt.bias      ={module}.dt_bias      mH       {words}
ssm_a.           ={module}.A            mH       flat {words}
ssm_d.           ={module}.D            mH       flat {words}
ssm_out          {module}.out_proj      h,mv     {words}
"""


_ATTENTION = """
attn_norm      input_layernorm      h     norm
attn_q         self_attn.q_proj     q,h   bias attention
attn_k         self_attn.k_proj     k,h   bias attention
attn_v         self_attn.v_proj     k,h   bias attention
attn_output    self_attn.o_proj     h,q   bias attention
"""

# One shared expert in each layer, with others or alone.
GRANITE_HYBRID = (
    mamba2_table("mamba", "recurrent")
    + _ATTENTION
    + """
ssm_norm   mamba.norm                 mv    norm flat recurrent
ffn_norm   post_attention_layernorm   h     norm
ffn_gate   shared_mlp.gate_proj       f,h   dense
ffn_up     shared_mlp.up_proj         f,h   dense
ffn_down   shared_mlp.output_linear   h,f   dense
"""
)

BAMBA = (
    mamba2_table("mamba", "recurrent")
    + _ATTENTION
    + """
ssm_norm    mamba.norm                mv    norm flat recurrent
ffn_norm    pre_ff_layernorm          h     norm optional
ffn_norm.   =pre_ff_layernorm.weight  h     norm optional
ffn_gate    feed_forward.gate_proj    f,h   bias
ffn_up      feed_forward.up_proj      f,h   bias
ffn_down    feed_forward.down_proj    h,f   bias
"""
)

# Both in every layer.
FALCON_H1 = (
    mamba2_table("mamba")
    + _ATTENTION
    + """
ssm_norm   mamba.norm                 mv    norm flat optional
ffn_norm.  =pre_ff_layernorm.weight   h     norm
ffn_gate   feed_forward.gate_proj     f,h   bias
ffn_up     feed_forward.up_proj       f,h   bias
ffn_down   feed_forward.down_proj     h,f   bias
"""
)

# One block in each layer.
NEMOTRON_H = (
    mamba2_table("mixer", "recurrent")
    + """
attn_norm     norm              h     norm
attn_q        mixer.q_proj      q,h   attention
attn_k        mixer.k_proj      k,h   attention
attn_v        mixer.v_proj      k,h   attention
attn_output   mixer.o_proj      h,q   attention
ssm_norm      mixer.norm        mv    norm flat recurrent
ffn_up        mixer.up_proj     f,h   bias mlp
ffn_down      mixer.down_proj   h,f   bias mlp
ffn_gate_inp      mixer.gate                           E,h    moe
exp_probs_b.bias  =mixer.gate.e_score_correction_bias  E      moe
ffn_latent_down   mixer.fc1_latent_proj                l,h    bias optional
ffn_latent_up     mixer.fc2_latent_proj                h,l    bias optional
ffn_up_exps       mixer.experts.*.up_proj              E,e,l  moe
ffn_down_exps     mixer.experts.*.down_proj            E,l,e  moe
ffn_up_shexp      mixer.shared_experts.up_proj         s,h    bias moe
ffn_down_shexp    mixer.shared_experts.down_proj       h,s    bias moe
"""
)
