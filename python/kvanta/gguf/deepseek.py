"""DeepSeek's latent attention and experts in GGUF files, and what other families share with them."""

from __future__ import annotations

from typing import Any

from kvanta.errors import InputError
from kvanta.gguf.latents import latent_sizes
from kvanta.gguf.metadata import Metadata
from kvanta.gguf.predicted_layers import leave_out_predicted_layers

Config = dict[str, Any]
_SIGMOID = 2  # expert_gating_func


def become(config: Config, class_name: str, model_type: str) -> None:
    config["architectures"], config["model_type"] = [class_name], model_type


def experts(metadata: Metadata, config: Config, count_key: str) -> None:
    config[count_key] = metadata.size("expert_count")
    config["num_experts_per_tok"] = metadata.size("expert_used_count")
    if metadata.has("expert_feed_forward_length"):
        config["moe_intermediate_size"] = metadata.size("expert_feed_forward_length")


def deepseek_experts(metadata: Metadata, config: Config) -> None:
    if metadata.count("expert_count") == 0:
        config["n_routed_experts"] = None  # absent, it would be the class's default
        return
    experts(metadata, config, "n_routed_experts")
    config["n_shared_experts"] = metadata.count("expert_shared_count")
    config["first_k_dense_replace"] = metadata.count("leading_dense_block_count")
    scale = metadata.value(f"{metadata.architecture}.expert_weights_scale")
    config["routed_scaling_factor"] = metadata.number("expert_weights_scale") if scale else 1.0
    config["norm_topk_prob"] = metadata.flag(f"{metadata.architecture}.expert_weights_norm", False)


def deepseek_groups(metadata: Metadata, config: Config) -> None:
    """Groups of experts. Files written before the keys existed are of DeepSeek's own models."""
    known = {256: (8, 4), 160: (8, 3)}
    groups, used = known.get(config.get("n_routed_experts", 0), (1, 1))
    config["n_group"] = metadata.size("expert_group_count", groups)
    config["topk_group"] = metadata.size("expert_group_used_count", used)


def _latents(metadata: Metadata, config: Config) -> None:
    latent_sizes(metadata, config)
    scaling = config["rope_scaling"]
    if metadata.architecture != "mistral4" and metadata.value(f"{metadata.architecture}.attention.temperature_scale"):
        raise InputError(
            f"{metadata.path} has queries that grow with the position; {metadata.architecture!r} models do not"
        )
    if scaling is not None and metadata.has("rope.scaling.yarn_log_multiplier"):
        mscale = round(10 * metadata.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}


def deepseek2(metadata: Metadata, config: Config) -> None:
    _latents(metadata, config)
    deepseek_experts(metadata, config)
    if metadata.count("expert_gating_func") == _SIGMOID:
        become(config, "DeepseekV3ForCausalLM", "deepseek_v3")
        deepseek_groups(metadata, config)
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        return
    config["norm_topk_prob"] = False
    deepseek_groups(metadata, config)
    config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"


def _sparse(metadata: Metadata, config: Config, class_name: str, model_type: str) -> None:
    """Attention to the tokens that indexers select; the last blocks predict further tokens."""
    leave_out_predicted_layers(metadata, config)
    _latents(metadata, config)
    deepseek_experts(metadata, config)
    deepseek_groups(metadata, config)
    become(config, class_name, model_type)
    config |= {
        "index_n_heads": metadata.size("attention.indexer.head_count"),
        "index_head_dim": metadata.size("attention.indexer.key_length"),
        "index_topk": metadata.size("attention.indexer.top_k"),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def deepseek32(metadata: Metadata, config: Config) -> None:
    _sparse(metadata, config, "DeepseekV32ForCausalLM", "deepseek_v32")


def glm_dsa(metadata: Metadata, config: Config) -> None:
    layers = config["num_hidden_layers"]
    _sparse(metadata, config, "GlmMoeDsaForCausalLM", "glm_moe_dsa")
    key = f"{metadata.architecture}.attention.indexer.types"
    if metadata.value(key) is not None:
        types = metadata.array(key, bool)
        if len(types) not in (layers, config["num_hidden_layers"]):
            raise InputError(f"{metadata.path}: key {key!r} has {len(types)} entries, not {layers}")
        used = types[: config["num_hidden_layers"]]
        config["indexer_types"] = ["full" if full else "shared" for full in used]
