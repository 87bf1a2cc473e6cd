// Mixtral: Mistral with experts in all layers. transformers: models/mixtral/modeling_mixtral.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadMixtral(const JsonObject& json, ModelConfig& config) {
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  for (LayerSpec& layer : config.layer_specs) {
    layer.visibility = cache::SlidingWindow(window);
    layer.moe = true;
  }
  ReadExpertCounts(json, "num_local_experts", "intermediate_size", config);
  config.moe.norm_topk_prob = true;
  config.names.mlp = "block_sparse_moe";
}

constexpr std::string_view kMixtralDefaults =
    R"({"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 131072})";

}  // namespace

extern const Architecture kMixtral = {.name = "MixtralForCausalLM",
                                      .model_type = "mixtral",
                                      .read_config = ReadMixtral,
                                      .defaults = kMixtralDefaults,
                                      .rope_theta = 1e6};

}  // namespace kvanta::models
