#include <fmt/format.h>

#include "models/architecture.h"

namespace kvanta::models {

bool ReadLayerTypes(const JsonObject& json, int window, ModelConfig& config) {
  constexpr const char* kKey = "layer_types";
  if (!json.Has(kKey)) return false;
  const Json& types = json.Get(kKey);
  if (!types.is_array() || types.size() != config.layer_specs.size()) {
    json.Fail(kKey, fmt::format("a list with one entry for each of {} layers", config.layers));
  }
  for (size_t layer = 0; layer < types.size(); ++layer) {
    const bool is_sliding = types[layer] == "sliding_attention";
    if (!is_sliding && types[layer] != "full_attention") {
      json.Fail(kKey, "entries 'full_attention' and 'sliding_attention' only");
    }
    if (is_sliding && window == 0) {
      json.Fail(kKey, "no 'sliding_attention' where the config sets no sliding window");
    }
    config.layer_specs[layer].visibility = cache::SlidingWindow(is_sliding ? window : 0);
  }
  return true;
}

void ReadAlternatingWindows(const JsonObject& json, int pattern, ModelConfig& config) {
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27));
  if (ReadLayerTypes(json, window, config)) return;
  for (int layer = 0; layer < config.layers; ++layer) {
    if ((layer + 1) % pattern != 0) config.layer_specs[layer].visibility = cache::SlidingWindow(window);
  }
}

}  // namespace kvanta::models
