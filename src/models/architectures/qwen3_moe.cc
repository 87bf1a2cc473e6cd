// Qwen3-MoE: Qwen3 with layers of experts. transformers: models/qwen3_moe/modeling_qwen3_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadQwen3Moe(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  if (json.Bool("use_sliding_window", false)) {  // applies to all layers
    const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
    for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
  }
  const char* experts = json.Has("num_local_experts") ? "num_local_experts" : "num_experts";
  ReadExpertCounts(json, experts, "moe_intermediate_size", config);
  ReadSparseLayers(json, config);
  config.moe.norm_topk_prob = json.Bool("norm_topk_prob", false);
}

constexpr std::string_view kQwen3MoeDefaults =
    R"({"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
  "moe_intermediate_size": 768})";

}  // namespace

extern const Architecture kQwen3Moe = {"Qwen3MoeForCausalLM", "qwen3_moe", ReadQwen3Moe, kQwen3MoeDefaults};

}  // namespace kvanta::models
