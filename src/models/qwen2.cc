// Qwen2, Qwen2.5: Llama with biases on q, k and v. transformers: models/qwen2/modeling_qwen2.py.
#include <fmt/format.h>

#include "models/architecture.h"
#include "models/decoder.h"

namespace kvanta::models {
namespace {

void ReadQwen2(const JsonObject& json, ModelConfig& config) {
  if (!json.Value().contains("num_key_value_heads")) json.Fail("num_key_value_heads", "an integer");
  config.qkv_bias = true;
  ReadLayerWindows(json, config);
}

}  // namespace

// transformers: a window counts only with use_sliding_window; layer_types says where, else layers from
// max_window_layers on have it.
void ReadLayerWindows(const JsonObject& json, ModelConfig& config) {
  int window = 0;
  if (json.Bool("use_sliding_window", false)) {
    window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  }
  if (!json.Has("layer_types")) {
    if (window == 0) return;
    const int64_t first = json.Int("max_window_layers", 0, int64_t{1} << 20);
    for (int layer = 0; layer < config.layers; ++layer) config.sliding_window[layer] = layer >= first ? window : 0;
    return;
  }
  const Json& types = json.Get("layer_types");
  if (!types.is_array() || types.size() != static_cast<size_t>(config.layers)) {
    json.Fail("layer_types", fmt::format("a list with one entry for each of {} layers", config.layers));
  }
  for (int layer = 0; layer < config.layers; ++layer) {
    const Json& type = types[layer];
    if (type == "full_attention") continue;
    if (type != "sliding_attention") {
      json.Fail("layer_types", "entries 'full_attention' and 'sliding_attention' only");
    }
    if (window == 0)
      json.Fail("layer_types", "no 'sliding_attention' unless use_sliding_window and sliding_window are set");
    config.sliding_window[layer] = window;
  }
}

const Architecture kQwen2 = {"Qwen2ForCausalLM", "qwen2", 0, ReadQwen2, LoadDecoder};

}  // namespace kvanta::models
