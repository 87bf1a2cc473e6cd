// Granite 4: Granite's factors, layers of Mamba-2 among those of attention, the latter with rope or without; in each a
// shared expert, with others or alone. transformers: models/granitemoehybrid/modeling_granitemoehybrid.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"
#include "models/config/mamba2_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// transformers 4 wrote "mamba" and "attention", 5 writes "linear_attention" and "full_attention".
void ReadHybridLayers(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "layer_types";
  const Json& types = json.Get(kKey);
  if (!types.is_array() || types.size() != config.layer_specs.size()) {
    json.Fail(kKey, fmt::format("a list with one entry for each of {} layers", config.layers));
  }
  for (size_t layer = 0; layer < types.size(); ++layer) {
    if (types[layer] == "linear_attention" || types[layer] == "mamba") {
      config.layer_specs[layer].MakeRecurrent(RecurrentKind::kMamba2);
    } else if (types[layer] != "full_attention" && types[layer] != "attention") {
      json.Fail(kKey, "entries 'full_attention' and 'linear_attention' only");
    }
  }
  if (std::ranges::all_of(config.layer_specs, &LayerSpec::IsRecurrent)) {
    json.Fail(kKey, "at least one layer of full_attention");
  }
}

void ReadGraniteMoeHybrid(const JsonObject& json, ModelConfig& config) {
  ReadGraniteFactors(json, config);
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.kind = MlpKind::kFusedGate;
  TensorNames& names = config.names;
  names.gate_up = "input_linear";
  names.down = "output_linear";
  const auto shared = static_cast<int>(json.Int("shared_intermediate_size", 1, kMaxExpertWidth));
  if (json.Int("num_local_experts", 0, kMaxExperts) == 0) {
    config.intermediate_size = shared;
    names.mlp = "shared_mlp";
  } else {
    ReadGraniteExperts(json, config);
    config.moe.shared_expert_intermediate_size = shared;
    names.shared_expert = "shared_mlp";
    names.shared_expert_in_layer = true;
  }
  if (json.String("position_embedding_type", "") != "rope") {
    for (LayerSpec& layer : config.layer_specs) layer.rope = {};
  }
  ReadExpandedMamba2(json, config);
  ReadHybridLayers(json, config);
}

constexpr std::string_view kGraniteMoeHybridDefaults = R"({"vocab_size": 32000, "hidden_size": 4096,
  "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_local_experts": 8,
  "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "max_position_embeddings": 2048, "mamba_n_heads": 128,
  "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kGraniteMoeHybrid = {"GraniteMoeHybridForCausalLM", "granitemoehybrid", ReadGraniteMoeHybrid,
                                               kGraniteMoeHybridDefaults};

}  // namespace kvanta::models
