// dots.llm1: Qwen3's attention with DeepSeek V3's experts. transformers: models/dots1/modeling_dots1.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// transformers: layer_types gives the layers with the window, else those from max_window_layers on have it.
void ReadDots1Windows(const JsonObject& json, ModelConfig& config) {
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  if (ReadLayerTypes(json, window, config) || window == 0) return;
  const int64_t first = json.Int("max_window_layers", 0, int64_t{1} << 20);
  for (int64_t layer = first; layer < config.layers; ++layer) {
    config.layer_specs[static_cast<size_t>(layer)].visibility = cache::SlidingWindow(window);
  }
}

void ReadDots1(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  ReadDots1Windows(json, config);
  MarkSparseLayers(json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 0), config);
  if (json.Int("moe_layer_freq", 1, 1, 1) != 1) json.Fail("moe_layer_freq", "1");
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
}

constexpr std::string_view kDots1Defaults = R"({"num_key_value_heads": 32, "moe_intermediate_size": 1408,
  "norm_topk_prob": false, "sliding_window": 4096, "max_window_layers": 62, "max_position_embeddings": 2048})";

}  // namespace

extern const Architecture kDots1 = {"Dots1ForCausalLM", "dots1", ReadDots1, kDots1Defaults};

}  // namespace kvanta::models
