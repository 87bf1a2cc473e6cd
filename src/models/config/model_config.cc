#include <fmt/format.h>

#include <algorithm>

#include "models/config/config.h"

namespace kvanta::models {

void FillLayerSpecs(ModelConfig& config) {
  config.layer_specs.resize(static_cast<size_t>(config.layers));
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.heads == 0) layer.heads = config.heads;
    if (layer.kv_heads == 0) layer.kv_heads = config.kv_heads;
    if (layer.head_dim == 0) layer.head_dim = config.head_dim;
    if (layer.intermediate_size == 0) layer.intermediate_size = config.intermediate_size;
  }
}

bool ModelConfig::AttendsInBothDirections() const {
  return std::ranges::any_of(layer_specs, [](const LayerSpec& layer) { return layer.visibility.both_directions; });
}

int ModelConfig::KvLayers() const {
  return static_cast<int>(std::ranges::count(layer_specs, -1, &LayerSpec::kv_layer));
}

std::vector<LayerSpec> ModelConfig::CachedLayers() const {
  const std::span<const LayerSpec> with_kv = LayersWithKv();
  std::vector<LayerSpec> cached(with_kv.begin(), with_kv.end());
  for (const LayerSpec& layer : with_kv) {
    if (layer.selection == TokenSelection::kIndexer) {
      LayerSpec& keys = cached.emplace_back();
      keys.kv_heads = 1;
      keys.head_dim = indexer.head_dim;
      keys.keys_only = true;
      keys.row_tokens = layer.row_tokens;
    }
    if (layer.row_tokens == 1) continue;
    LayerSpec entries;
    entries.kv_heads = 1;
    entries.head_dim = layer.head_dim;
    entries.row_tokens = layer.row_tokens;
    entries.compressed_layer = static_cast<int>(&layer - with_kv.data());
    LayerSpec inputs = entries;
    inputs.selection = layer.selection;
    inputs.MakeRecurrent(RecurrentKind::kCompressor);
    cached.push_back(entries);
    cached.push_back(inputs);
  }
  return cached;
}

std::vector<ModelConfig::OwnCacheLayers> ModelConfig::CacheLayersOf() const {
  std::vector<OwnCacheLayers> cache_layers;
  int next = KvLayers();
  for (const LayerSpec& layer : LayersWithKv()) {
    OwnCacheLayers& own = cache_layers.emplace_back();
    if (layer.selection == TokenSelection::kIndexer) own.keys = next++;
    if (layer.row_tokens == 1) continue;
    own.entries = next++;
    own.inputs = next++;
  }
  return cache_layers;
}

formats::StateShape ModelConfig::State(const LayerSpec& layer) const noexcept {
  switch (layer.recurrent) {
    case RecurrentKind::kNone:
      break;
    case RecurrentKind::kGatedDeltaNet:
    case RecurrentKind::kKimiDelta:
      return gated_delta_net.State();
    case RecurrentKind::kShortConv:
      return short_conv.State();
    case RecurrentKind::kMamba2:
      return mamba2.shape.State();
    case RecurrentKind::kCompressor:
      return Compressor(layer).State();
  }
  return {};
}

bool ModelConfig::HasStates() const noexcept {
  return std::ranges::any_of(layer_specs,
                             [](const LayerSpec& layer) { return layer.IsRecurrent() || layer.row_tokens != 1; });
}

kernels::CompressorShape ModelConfig::Compressor(const LayerSpec& layer) const noexcept {
  const bool has_indexer = layer.selection == TokenSelection::kIndexer;
  return {.row_tokens = layer.row_tokens,
          .overlaps = has_indexer,
          .entry_dim = layer.head_dim,
          .key_dim = has_indexer ? indexer.head_dim : 0};
}

int64_t ModelConfig::StateInputBytes() const noexcept {
  int64_t floats = 0;
  for (const LayerSpec& layer : layer_specs) {
    if (layer.row_tokens != 1) floats += Compressor(layer).InputWidth();
    switch (layer.recurrent) {
      case RecurrentKind::kNone:
        break;
      case RecurrentKind::kGatedDeltaNet:
      case RecurrentKind::kKimiDelta:
        floats += gated_delta_net.InputWidth();
        break;
      case RecurrentKind::kShortConv:
        floats += short_conv.InputWidth();
        break;
      case RecurrentKind::kMamba2:
        floats += mamba2.shape.InputWidth();
        break;
      case RecurrentKind::kCompressor:
        break;
    }
  }
  return floats * static_cast<int64_t>(sizeof(float));
}

std::vector<int> ModelConfig::SlidingWindows() const {
  std::vector<int> windows;
  for (const LayerSpec& layer : layer_specs) {
    windows.push_back(layer.visibility.kind == cache::VisibilityKind::kSlidingWindow ? layer.visibility.span : 0);
  }
  return windows;
}

std::string PredictorModule(const ModelConfig& config, const TensorNames::Decoder& names) {
  const TensorNames::Predictor& predictor = config.names.predictor;
  if (!predictor.prefix.empty()) return std::string(predictor.prefix);
  return fmt::format("{}layers.{}.", names.prefix, config.layer_specs.front().stored_attention);
}

ModelConfig ConfigOfPredictor(ModelConfig config) {
  const std::string_view prefix = config.names.predictor.prefix;
  const auto last = std::find_if(config.layer_specs.rbegin(), config.layer_specs.rend(),
                                 [](const LayerSpec& layer) { return !layer.IsRecurrent(); });
  const bool is_last = config.predictor_layer < 0;
  LayerSpec layer = is_last ? *last : config.layer_specs[static_cast<size_t>(config.predictor_layer)];
  if (is_last) layer.moe = config.layer_specs.back().moe;
  config.predictor_layer = -1;
  layer.stored_attention = layer.stored_mlp = prefix.empty() ? config.layers : 0;
  if (!prefix.empty()) config.names.decoders = {{.prefix = prefix}};
  config.layer_specs = {layer};
  config.declared_kv_cache_layers.clear();
  config.layers = 1;
  return config;
}

ModelConfig ConfigOfLayers(ModelConfig config, int first, int count) {
  const auto keep = [&](auto& of_layers) {
    if (!of_layers.empty()) of_layers = {of_layers.begin() + first, of_layers.begin() + first + count};
  };
  keep(config.layer_specs);
  keep(config.declared_kv_cache_layers);
  config.layers = count;
  return config;
}

}  // namespace kvanta::models
