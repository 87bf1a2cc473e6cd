"""GGUF architectures: the Hugging Face class of each, and the keys of config.json that not all have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.deepseek import (
    become,
    deepseek2,
    deepseek32,
    deepseek_experts,
    deepseek_groups,
    experts,
    glm_dsa,
)
from kvanta.gguf.dense_families import (
    apertus,
    falcon,
    gpt2,
    gptneox,
    minicpm,
    olmo,
    phi2,
    phi3,
    squared_relu,
    stablelm,
    starcoder,
    starcoder2,
)
from kvanta.gguf.expert_families import afmoe, hunyuan_moe, mimo2, mistral4, step35
from kvanta.gguf.gemma4 import gemma4
from kvanta.gguf.kimi_linear import kimi_linear
from kvanta.gguf.mamba2 import falcon_h1, granite_hybrid, nemotron_h
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.predicted_layers import leave_out_predicted_layers
from kvanta.gguf.recurrent_families import lfm2, lfm2_moe
from kvanta.gguf.window_families import cohere2, command_r, every, exaone4, window_layers

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """An architecture of GGUF. `complete` adds to the common keys, and may choose another class."""

    class_name: str
    model_type: str
    complete: Callable[[Metadata, Config], None]
    has_experts: bool = False
    is_latent: bool = False
    """Multi-head latent attention: heads have no one size."""
    has_sizes_by_layer: bool = False
    """Layers have heads, MLPs and ropes of several kinds: `complete` sets their keys."""
    has_layers_without_kv: bool = False
    """Layers without attention have 0 KV heads."""
    layer_norm_eps: str = ""
    """Hugging Face's key of LayerNorm's epsilon; "": norms are RMSNorm."""


def _as_in_common(_metadata: Metadata, _config: Config) -> None:
    """The keys that all architectures have are all there are."""


def _llama(metadata: Metadata, config: Config) -> None:
    if metadata.count("expert_count") > 1:
        become(config, "MixtralForCausalLM", "mixtral")
        experts(metadata, config, "num_local_experts")
    elif metadata.has("attention.sliding_window"):
        become(config, "MistralForCausalLM", "mistral")
    if metadata.has("attention.sliding_window"):
        config["sliding_window"] = metadata.size("attention.sliding_window")


def _mistral(metadata: Metadata, config: Config) -> None:
    has_window = metadata.has("attention.sliding_window")
    config["sliding_window"] = metadata.size("attention.sliding_window") if has_window else None


def _qwen(_metadata: Metadata, config: Config) -> None:
    config["use_sliding_window"] = False


def _qwen_moe(metadata: Metadata, config: Config) -> None:
    _qwen(metadata, config)
    experts(metadata, config, "num_experts")
    # Not in the file: of those that are published, only Qwen2-MoE does not normalize the chosen experts' weights.
    config["norm_topk_prob"] = metadata.architecture != "qwen2moe"
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if metadata.architecture not in ("qwen3moe", "qwen3vlmoe"):
        config["shared_expert_intermediate_size"] = metadata.size("expert_shared_feed_forward_length")


def _qwen3_vl_moe(metadata: Metadata, config: Config) -> None:
    _qwen_moe(metadata, config)  # the language model: of text, the rope's three positions are equal


def _olmoe(metadata: Metadata, config: Config) -> None:
    experts(metadata, config, "num_experts")
    config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])
    config["norm_topk_prob"] = False  # of the published model


def _minimax_m2(metadata: Metadata, config: Config) -> None:
    experts(metadata, config, "num_local_experts")
    config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])


def _ernie4_5_moe(metadata: Metadata, config: Config) -> None:
    config |= {
        "moe_num_experts": metadata.size("expert_count"),
        "moe_k": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.count("expert_shared_count"),
        "moe_layer_start_index": metadata.count("leading_dense_block_count"),
        "moe_layer_interval": metadata.size("interleave_moe_layer_step", 1),
    }


def _dots1(metadata: Metadata, config: Config) -> None:
    deepseek_experts(metadata, config)
    config |= {"n_group": 1, "topk_group": 1, "sliding_window": None}


def _exaone_moe(metadata: Metadata, config: Config) -> None:
    leave_out_predicted_layers(metadata, config)
    window_layers(metadata, config, 4)
    deepseek_experts(metadata, config)
    config["num_experts"] = config.pop("n_routed_experts")
    config["num_shared_experts"] = config.pop("n_shared_experts")
    deepseek_groups(metadata, config)


def _gated_delta_net(metadata: Metadata, config: Config) -> None:
    """Layers that have Gated DeltaNet in place of attention, and its sizes."""
    blocks = config["num_hidden_layers"]
    leave_out_predicted_layers(metadata, config)
    if metadata.has("attention.recurrent_layers"):
        flags = metadata.array(f"{metadata.architecture}.attention.recurrent_layers", int, blocks)
    else:
        flags = every(blocks, metadata.size("full_attention_interval", 4))
    flags = flags[: config["num_hidden_layers"]]
    config["layer_types"] = ["linear_attention" if flag else "full_attention" for flag in flags]
    key_heads, value_heads = metadata.size("ssm.group_count"), metadata.size("ssm.time_step_rank")
    values = metadata.size("ssm.inner_size")
    if values % value_heads != 0:
        raise InputError(
            f"{metadata.path} has {value_heads} value heads of {values} channels together, which do not fit"
        )
    config |= {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": values // value_heads,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
    }
    # The value heads of a key head are adjacent in qwen3next, and as many heads apart as there are key heads else.
    if metadata.architecture != "qwen3next" and value_heads != key_heads:
        config["linear_value_heads_tiled"] = True


def _qwen_hybrid_moe(metadata: Metadata, config: Config) -> None:
    _qwen_moe(metadata, config)
    _gated_delta_net(metadata, config)


def _gemma(metadata: Metadata, config: Config, layers_of_27b: int) -> None:
    config["hidden_activation"] = config.pop("hidden_act").replace("silu", "gelu_pytorch_tanh")
    # The scale of attention is not in the file: models of 27 B alone take hidden_size / heads for the size of a head.
    is_27b = config["num_hidden_layers"] == layers_of_27b
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if is_27b else config["head_dim"]


def _gemma2(metadata: Metadata, config: Config) -> None:
    _gemma(metadata, config, layers_of_27b=46)
    window_layers(metadata, config, 2, window=4096)
    # The first files of Gemma 2 lack the keys.
    config["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = metadata.number("final_logit_softcapping", 30.0)


def _gemma3(metadata: Metadata, config: Config) -> None:
    _gemma(metadata, config, layers_of_27b=62)
    window_layers(metadata, config, 6, window=0)
    if metadata.value("gemma3.final_logit_softcapping"):
        config["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    config["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)


def _embedding_gemma(metadata: Metadata, config: Config) -> None:
    _gemma3(metadata, config)
    config["use_bidirectional_attention"] = True  # the file need not say it


def _gemma1(_metadata: Metadata, config: Config) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def _gpt_oss(metadata: Metadata, config: Config) -> None:
    experts(metadata, config, "num_local_experts")
    config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])
    window_layers(metadata, config, 2)
    config |= {"attention_bias": True, "swiglu_limit": 7.0}
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["truncate"] = False


def _glm4_moe(metadata: Metadata, config: Config) -> None:
    deepseek_experts(metadata, config)
    leave_out_predicted_layers(metadata, config)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in metadata.tensors
    config |= {"n_group": 1, "topk_group": 1}


def _granite(metadata: Metadata, config: Config) -> None:
    head_scale = config["head_dim"] ** -0.5
    config["embedding_multiplier"] = metadata.number("embedding_scale", 1.0)
    config["residual_multiplier"] = metadata.number("residual_scale", 1.0)
    config["attention_multiplier"] = metadata.number("attention.scale", head_scale)
    config["logits_scaling"] = metadata.number("logit_scale", 1.0)


def _granite_moe(metadata: Metadata, config: Config) -> None:
    _granite(metadata, config)
    experts(metadata, config, "num_local_experts")
    config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])
    if metadata.count("expert_shared_feed_forward_length") > 0:
        become(config, "GraniteMoeSharedForCausalLM", "granitemoeshared")
        config["shared_intermediate_size"] = metadata.size("expert_shared_feed_forward_length")


def _olmo2(metadata: Metadata, config: Config) -> None:
    if metadata.count("attention.sliding_window") > 0:
        become(config, "Olmo3ForCausalLM", "olmo3")
        window_layers(metadata, config, 4)


def _smollm3(_metadata: Metadata, config: Config) -> None:
    config |= {"no_rope_layer_interval": 4, "use_sliding_window": False}  # of every published SmolLM3


def _llama4(metadata: Metadata, config: Config) -> None:
    if metadata.value("llama4.attention.sliding_window") == 0:
        raise InputError(f"{metadata.path} has no chunks in any layer, which is not supported for 'llama4'")
    experts(metadata, config, "num_local_experts")
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = config.pop("moe_intermediate_size")
    config["interleave_moe_layer_step"] = metadata.size("interleave_moe_layer_step", 1)
    config["shared_expert_intermediate_size"] = config["intermediate_size"]
    config["attention_chunk_size"] = 8192
    # Not in the file: Scout, of 16 experts, normalizes q and k; Maverick, of 128, does not.
    config["use_qk_norm"] = config["num_local_experts"] == 16
    config |= {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1}


def _mistral3(metadata: Metadata, config: Config) -> None:
    if metadata.count("expert_count") > 1:
        raise InputError(f"{metadata.path} is a mixture of experts, which is not supported for 'mistral3'")
    rope = config.pop("rope_scaling") or {"rope_type": "default"}
    if rope["rope_type"] == "yarn":
        # mscale_all_dim, or a tenth of it, by the format of the checkpoint that llama.cpp converted.
        logarithm = metadata.number("rope.scaling.yarn_log_multiplier", 0.1)
        mscale = round(logarithm if logarithm > 0.5 else 10 * logarithm, 6)
        rope |= {"mscale": mscale, "mscale_all_dim": mscale}
    if metadata.has("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = metadata.number("attention.temperature_scale")
        rope["original_max_position_embeddings"] = metadata.size(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
    config["rope_parameters"] = rope | {"rope_theta": config.pop("rope_theta")}


def _phimoe(metadata: Metadata, config: Config) -> None:
    phi3(metadata, config)
    experts(metadata, config, "num_local_experts")
    config["lm_head_bias"] = "output.bias" in metadata.tensors
    if config["rope_scaling"] is not None:  # not in the file: of the published model
        config["rope_scaling"] |= dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)


ARCHITECTURES = {
    "llama": Family("LlamaForCausalLM", "llama", _llama, has_experts=True),
    "mistral": Family("MistralForCausalLM", "mistral", _mistral),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _qwen),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "qwen2moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", _qwen_moe, has_experts=True),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen_moe, has_experts=True),
    "qwen3next": Family("Qwen3NextForCausalLM", "qwen3_next", _qwen_hybrid_moe, has_experts=True),
    "qwen35": Family("Qwen3_5ForCausalLM", "qwen3_5_text", _gated_delta_net),
    "qwen35moe": Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen_hybrid_moe, has_experts=True),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", lfm2, has_layers_without_kv=True),
    "lfm2moe": Family("Lfm2MoeForCausalLM", "lfm2_moe", lfm2_moe, has_experts=True, has_layers_without_kv=True),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gemma-embedding": Family("Gemma3TextModel", "gemma3_text", _embedding_gemma),
    "gemma4": Family("Gemma4ForCausalLM", "gemma4_text", gemma4, has_experts=True, has_sizes_by_layer=True),
    "qwen2vl": Family("Qwen2ForCausalLM", "qwen2", _qwen),  # the language models, without images
    "qwen3vl": Family("Qwen3ForCausalLM", "qwen3", _qwen),
    "gemma": Family("GemmaForCausalLM", "gemma", _gemma1),
    "seed_oss": Family("SeedOssForCausalLM", "seed_oss", _as_in_common),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", _as_in_common),
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", exaone4),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _as_in_common),
    "command-r": Family("CohereForCausalLM", "cohere", command_r, layer_norm_eps="layer_norm_eps"),
    "cohere2": Family("Cohere2ForCausalLM", "cohere2", cohere2, layer_norm_eps="layer_norm_eps"),
    "arcee": Family("ArceeForCausalLM", "arcee", squared_relu),
    "nemotron": Family("NemotronForCausalLM", "nemotron", squared_relu, layer_norm_eps="norm_eps"),
    "stablelm": Family("StableLmForCausalLM", "stablelm", stablelm, layer_norm_eps="layer_norm_eps"),
    "starcoder2": Family("Starcoder2ForCausalLM", "starcoder2", starcoder2, layer_norm_eps="norm_epsilon"),
    "phi2": Family("PhiForCausalLM", "phi", phi2, layer_norm_eps="layer_norm_eps"),
    "gptneox": Family("GPTNeoXForCausalLM", "gpt_neox", gptneox, layer_norm_eps="layer_norm_eps"),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", gpt2, layer_norm_eps="layer_norm_epsilon"),
    "starcoder": Family("GPTBigCodeForCausalLM", "gpt_bigcode", starcoder, layer_norm_eps="layer_norm_epsilon"),
    "olmo": Family("OlmoForCausalLM", "olmo", olmo, layer_norm_eps="layer_norm_eps"),
    "jais2": Family("Jais2ForCausalLM", "jais2", squared_relu, layer_norm_eps="layer_norm_eps"),
    "falcon": Family("FalconForCausalLM", "falcon", falcon, layer_norm_eps="layer_norm_epsilon"),
    "apertus": Family("ApertusForCausalLM", "apertus", apertus),
    # The arithmetic of other classes.
    "internlm2": Family("LlamaForCausalLM", "llama", _as_in_common),
    "minicpm": Family("GraniteForCausalLM", "granite", minicpm),
    "chatglm": Family("GlmForCausalLM", "glm", _as_in_common),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", _gpt_oss, has_experts=True),
    "phi3": Family("Phi3ForCausalLM", "phi3", phi3),
    "deepseek2": Family("DeepseekV2ForCausalLM", "deepseek_v2", deepseek2, has_experts=True, is_latent=True),
    "deepseek32": Family("DeepseekV32ForCausalLM", "deepseek_v32", deepseek32, has_experts=True, is_latent=True),
    "glm-dsa": Family("GlmMoeDsaForCausalLM", "glm_moe_dsa", glm_dsa, has_experts=True, is_latent=True),
    "mistral3": Family("Ministral3ForCausalLM", "ministral3", _mistral3),
    "llama4": Family("Llama4ForCausalLM", "llama4_text", _llama4, has_experts=True),
    "glm4": Family("Glm4ForCausalLM", "glm4", _as_in_common),
    "glm4moe": Family("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, has_experts=True),
    "qwen3vlmoe": Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3_vl_moe, has_experts=True),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", _olmoe, has_experts=True),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", "minimax_m2", _minimax_m2, has_experts=True),
    "ernie4_5-moe": Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ernie4_5_moe, has_experts=True),
    "dots1": Family("Dots1ForCausalLM", "dots1", _dots1, has_experts=True),
    "exaone-moe": Family("ExaoneMoeForCausalLM", "exaone_moe", _exaone_moe, has_experts=True),
    "granitemoe": Family("GraniteMoeForCausalLM", "granitemoe", _granite_moe, has_experts=True),
    "granitehybrid": Family(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", granite_hybrid, has_experts=True, has_sizes_by_layer=True
    ),
    "falcon-h1": Family("FalconH1ForCausalLM", "falcon_h1", falcon_h1),
    "nemotron_h": Family("NemotronHForCausalLM", "nemotron_h", nemotron_h, has_sizes_by_layer=True),
    "nemotron_h_moe": Family(
        "NemotronHForCausalLM", "nemotron_h", nemotron_h, has_experts=True, has_sizes_by_layer=True
    ),
    "kimi-linear": Family(
        "KimiLinearForCausalLM",
        "kimi_linear",
        kimi_linear,
        has_experts=True,
        is_latent=True,
        has_layers_without_kv=True,
    ),
    "afmoe": Family("AfmoeForCausalLM", "afmoe", afmoe, has_experts=True),
    "hunyuan-moe": Family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", hunyuan_moe, has_experts=True),
    "mimo2": Family("MiMoV2FlashForCausalLM", "mimo_v2_flash", mimo2, has_experts=True, has_sizes_by_layer=True),
    "step35": Family("Step3p5ForCausalLM", "step3p5", step35, has_experts=True, has_sizes_by_layer=True),
    "mistral4": Family("Mistral4ForCausalLM", "mistral4", mistral4, has_experts=True, is_latent=True),
    "phimoe": Family("PhimoeForCausalLM", "phimoe", _phimoe, has_experts=True),
    "granite": Family("GraniteForCausalLM", "granite", _granite),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _olmo2),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", _smollm3),
}
