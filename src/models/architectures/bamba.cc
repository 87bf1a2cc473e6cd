// Bamba: layers of Mamba-2 among those of attention, whose heads are rotated in part.
// transformers: models/bamba/modeling_bamba.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"
#include "models/config/mamba2_config.h"

namespace kvanta::models {
namespace {

void ReadAttentionLayers(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "attn_layer_indices";
  const Json& layers = json.Get(kKey);
  const auto is_layer = [&](const Json& layer) {
    return layer.is_number_unsigned() && layer.get<uint64_t>() < config.layer_specs.size();
  };
  if (!layers.is_array() || layers.empty() || !std::ranges::all_of(layers, is_layer)) {
    json.Fail(kKey, fmt::format("a list of layers from 0 to {}", config.layers - 1));
  }
  for (int layer = 0; layer < config.layers; ++layer) {
    const bool is_attention = std::count(layers.begin(), layers.end(), layer) != 0;
    if (!is_attention) config.layer_specs[layer].MakeRecurrent(RecurrentKind::kMamba2);
  }
}

void ReadBamba(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  TensorNames& names = config.names;
  names.pre_mlp_norm = "pre_ff_layernorm";
  names.mlp = "feed_forward";
  names.final_norm = "final_layernorm";
  ReadExpandedMamba2(json, config);
  ReadAttentionLayers(json, config);
}

constexpr std::string_view kBambaDefaults = R"({"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 262144, "partial_rotary_factor": 0.5, "mamba_n_heads": 128, "mamba_n_groups": 1,
  "mamba_d_state": 256, "mamba_d_conv": 4, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kBamba = {.name = "BambaForCausalLM",
                                    .model_type = "bamba",
                                    .read_config = ReadBamba,
                                    .defaults = kBambaDefaults,
                                    .partial_rotary = true};

}  // namespace kvanta::models
