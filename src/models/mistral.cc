// Mistral: Llama with one sliding window in all layers. transformers: models/mistral/modeling_mistral.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadMistral(const JsonObject& json, ModelConfig& config) {
  // The class's defaults (8, 4096) are those of one model: required where the file is silent.
  if (!json.Value().contains("num_key_value_heads")) json.Fail("num_key_value_heads", "an integer");
  if (!json.Value().contains("sliding_window")) json.Fail("sliding_window", "an integer, or null for none");
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
  if (json.Has("layer_types")) {  // accepted where it says the same; transformers ignores it with a warning
    const Json& types = json.Get("layer_types");
    for (const Json& type : types) {
      if (type != (window != 0 ? "sliding_attention" : "full_attention")) {
        json.Fail("layer_types", "the same attention in all layers, as sliding_window says");
      }
    }
  }
}

}  // namespace

extern const Architecture kMistral = {"MistralForCausalLM", "mistral", ReadMistral};

}  // namespace kvanta::models
