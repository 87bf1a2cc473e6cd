// Qwen2, Qwen2.5: Llama with biases on q, k and v. transformers: models/qwen2/modeling_qwen2.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadQwen2(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = true;
  ReadQwenWindows(json, config);
}

}  // namespace

// transformers: a window counts only with use_sliding_window; layer_types gives its layers, else layers from
// max_window_layers on have it.
void ReadQwenWindows(const JsonObject& json, ModelConfig& config) {
  int window = 0;
  if (json.Bool("use_sliding_window", false)) {
    window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  }
  if (ReadLayerTypes(json, window, config) || window == 0) return;
  const int64_t first = json.Int("max_window_layers", 0, int64_t{1} << 20);
  for (int64_t layer = first; layer < config.layers; ++layer) {
    config.layer_specs[layer].visibility = cache::SlidingWindow(window);
  }
}

extern const Architecture kQwen2 = {
    .name = "Qwen2ForCausalLM",
    .model_type = "qwen2",
    .read_config = ReadQwen2,
    .defaults = R"({"num_key_value_heads": 32, "max_window_layers": 28, "max_position_embeddings": 32768})",
    .text_defaults = kQwenTextDefaults};

}  // namespace kvanta::models
