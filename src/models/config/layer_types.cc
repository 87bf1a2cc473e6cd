#include <fmt/format.h>

#include <algorithm>

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

void ReadRecurrentLayers(const JsonObject& json, const RecurrentLayers& recurrent, ModelConfig& config) {
  constexpr const char* kKey = "layer_types";
  const Json* types = json.Find(kKey);
  if (types != nullptr && (!types->is_array() || types->size() != config.layer_specs.size())) {
    json.Fail(kKey, fmt::format("a list with one entry for each of {} layers", config.layers));
  }
  for (size_t layer = 0; layer < config.layer_specs.size(); ++layer) {
    bool is_recurrent = types == nullptr && recurrent.layers[layer];
    if (types != nullptr) {
      is_recurrent = (*types)[layer] == recurrent.name;
      if (!is_recurrent && (*types)[layer] != "full_attention") {
        json.Fail(kKey, fmt::format("entries 'full_attention' and '{}' only", recurrent.name));
      }
    }
    if (is_recurrent) config.layer_specs[layer].MakeRecurrent(recurrent.kind);
  }
  if (std::ranges::all_of(config.layer_specs, &LayerSpec::IsRecurrent)) {
    json.Fail(kKey, "at least one layer of full_attention");
  }
}

void ReadKimiDeltaLayers(const JsonObject& json, std::vector<bool> layers, const JsonObject& shape_keys,
                         const KimiDeltaKeys& keys, ModelConfig& config) {
  constexpr int kUnit = 8, kMaxHeads = 4096;
  kernels::GatedDeltaNetShape& shape = config.gated_delta_net;
  shape.channel_decay = true;
  shape.k_heads = shape.v_heads = static_cast<int>(shape_keys.Int(keys.heads, 1, kMaxHeads));
  shape.k_dim = shape.v_dim = static_cast<int>(shape_keys.Int(keys.head_dim, kUnit, kernels::kMaxDeltaHeadDim));
  if (shape.k_dim % kUnit != 0) {
    shape_keys.Fail(keys.head_dim, fmt::format("a multiple of {} up to {}", kUnit, kernels::kMaxDeltaHeadDim));
  }
  shape.conv_width = static_cast<int>(shape_keys.Int(keys.conv_width, 2, kernels::kMaxConvWidth));
  ReadRecurrentLayers(
      json, {.kind = RecurrentKind::kKimiDelta, .name = "linear_attention", .layers = std::move(layers)}, config);
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.IsRecurrent()) layer.head_dim = shape.v_dim;  // else that of the latents
  }
}

void ReadGatedDeltaNetLayers(const JsonObject& json, ModelConfig& config) {
  const int64_t interval = json.Int("full_attention_interval", 1, 4096, 4);
  std::vector<bool> layers;
  for (int layer = 0; layer < config.layers; ++layer) layers.push_back((layer + 1) % interval != 0);
  ReadRecurrentLayers(json, {.kind = RecurrentKind::kGatedDeltaNet, .name = "linear_attention", .layers = layers},
                      config);
  constexpr int kMaxHeads = 4096, kUnit = 8;
  const auto head_dim = [&](const char* key) {
    const auto dim = static_cast<int>(json.Int(key, kUnit, kernels::kMaxDeltaHeadDim));
    if (dim % kUnit != 0) json.Fail(key, fmt::format("a multiple of {} up to {}", kUnit, kernels::kMaxDeltaHeadDim));
    return dim;
  };
  kernels::GatedDeltaNetShape& shape = config.gated_delta_net;
  shape.k_heads = static_cast<int>(json.Int("linear_num_key_heads", 1, kMaxHeads));
  shape.v_heads = static_cast<int>(json.Int("linear_num_value_heads", 1, kMaxHeads));
  if (shape.v_heads % shape.k_heads != 0) {
    json.Fail("linear_num_value_heads", fmt::format("a multiple of linear_num_key_heads ({})", shape.k_heads));
  }
  shape.k_dim = head_dim("linear_key_head_dim");
  shape.v_dim = head_dim("linear_value_head_dim");
  shape.tiled_v_heads = json.Bool("linear_value_heads_tiled", false);  // not Hugging Face's: of GGUF files
  shape.conv_width = static_cast<int>(json.Int("linear_conv_kernel_dim", 2, kernels::kMaxConvWidth));
}

std::vector<bool> ReadLayersWithRope(const JsonObject& json, int layers) {
  constexpr const char* kKey = "no_rope_layers";
  const Json list = json.Has(kKey) ? json.Get(kKey) : Json::array();
  const auto is_flag = [](const Json& value) {
    return value.is_boolean() || (value.is_number_unsigned() && value.get<uint64_t>() <= 1);
  };
  const bool fits = list.is_array() && (list.empty() || list.size() >= static_cast<size_t>(layers));
  if (!fits || !std::ranges::all_of(list, is_flag)) {
    json.Fail(kKey, fmt::format("a list of 1 (rope) or 0 (none) for each of {} layers", layers));
  }
  const int64_t interval = json.Int("no_rope_layer_interval", 1, int64_t{1} << 20, 4);
  std::vector<bool> rope;
  for (int layer = 0; layer < layers; ++layer) rope.push_back((layer + 1) % interval != 0);
  for (size_t layer = 0; layer < rope.size() && !list.empty(); ++layer) {
    rope[layer] = list[layer].is_boolean() ? list[layer].get<bool>() : list[layer].get<uint64_t>() == 1;
  }
  return rope;
}

}  // namespace kvanta::models
