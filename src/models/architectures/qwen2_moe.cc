// Qwen1.5-MoE and Qwen2-MoE: Qwen2 with layers of experts, each with a gated shared expert.
// transformers: models/qwen2_moe/modeling_qwen2_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// transformers: without layer_types, every other one of the first max_window_layers layers has the window.
void ReadQwen2MoeWindows(const JsonObject& json, ModelConfig& config) {
  if (!json.Bool("use_sliding_window", false)) {
    ReadLayerTypes(json, 0, config);
    return;
  }
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  if (ReadLayerTypes(json, window, config)) return;
  const int64_t end = json.Int("max_window_layers", 0, int64_t{1} << 20, 28);
  for (int layer = 0; layer < config.layers && layer < end; layer += 2) {
    config.layer_specs[layer].visibility = cache::SlidingWindow(window);
  }
}

void ReadQwen2Moe(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = json.Bool("qkv_bias", true);
  ReadQwen2MoeWindows(json, config);
  ReadExpertCounts(json, "num_experts", "moe_intermediate_size", config);
  ReadSparseLayers(json, config);
  config.moe.norm_topk_prob = json.Bool("norm_topk_prob", false);
  config.moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("shared_expert_intermediate_size", 1, kMaxExpertWidth));
  config.moe.shared_expert_gate = true;
  config.names.shared_expert = "shared_expert";
}

constexpr std::string_view kQwen2MoeDefaults =
    R"({"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
  "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632})";

}  // namespace

extern const Architecture kQwen2Moe = {"Qwen2MoeForCausalLM", "qwen2_moe", ReadQwen2Moe, kQwen2MoeDefaults};

}  // namespace kvanta::models
