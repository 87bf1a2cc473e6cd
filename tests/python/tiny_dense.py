"""Settings of random tiny checkpoints of GPT-2, GPT-NeoX, OPT, Phi-2, Falcon and others (tiny_models.py)."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "Falcon": {"intermediate_size": 256},
    "MiniCPM": {
        "embedding_multiplier": 7.3,
        "attention_multiplier": 0.25,
        "residual_multiplier": 0.37,
        "logits_scaling": 2.5,
    },
    "ChatGLM": {"pad_token_id": 0, "head_dim": 16},
    "GraniteSWA": {
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "layer_rope_theta": [0, 1e4, 5e5, 1e4],
        "embedding_multiplier": 7.3,
        "attention_multiplier": 0.21,
        "residual_multiplier": 0.37,
        "logits_scaling": 2.7,
    },
    "Helium": {"head_dim": 16, "pad_token_id": 0},
    "NanoChat": {"pad_token_id": 0, "final_logit_softcapping": 2.0},
    "GPTJ": {"rotary_dim": 8},
    "Olmo": {"pad_token_id": 0},
    "VaultGemma": {
        "head_dim": 32,
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 1.0,
    },
    "Apertus": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
ARCHITECTURES = [
    *("Starcoder2", "Phi", "GPTNeoX", "GPT2", "OPT", "Apertus", "Falcon", "InternLM2", "MiniCPM", "ChatGLM"),
    *("GraniteSWA", "Jais2", "Helium", "NanoChat", "GPTJ", "GPTBigCode", "Olmo", "VaultGemma"),
]
CLASSES = {"GPT2": "GPT2LMHeadModel", "Step3p7": "Step3p7ForConditionalGeneration"}
"""Names of classes that are not the architecture's with "ForCausalLM"."""
_ONE_KIND_OF_HEADS = {"num_key_value_heads": "", "head_dim": "", "rms_norm_eps": ""}
_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    **_ONE_KIND_OF_HEADS,
}
# The classes' names of keys; "": they have none.
KEYS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("GPT2", "GPTJ", "GPTBigCode"), _GPT2),
    "Jais2": {"rms_norm_eps": ""},
    "Olmo": {"rms_norm_eps": "", "head_dim": ""},
    "OPT": {"intermediate_size": "ffn_dim", **_ONE_KIND_OF_HEADS},
    "GPTNeoX": _ONE_KIND_OF_HEADS,
    "Falcon": {"intermediate_size": "ffn_hidden_size", **_ONE_KIND_OF_HEADS},
    "Phi": {"rms_norm_eps": ""},
    "Starcoder2": {"rms_norm_eps": ""},
}


def own_keys(architecture: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings under the class's names."""
    names = KEYS.get(architecture, {})
    return {names.get(key, key): value for key, value in settings.items() if names.get(key, key)}
