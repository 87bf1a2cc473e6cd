// SmolLM3: Llama with layers without rope, every fourth by default. transformers:
// models/smollm3/modeling_smollm3.py.
#include <fmt/format.h>

#include "models/architecture.h"

namespace kvanta::models {
namespace {

// Layers without rope: the zeros of no_rope_layers, which has an entry for each layer and may have more.
void ReadLayersWithoutRope(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "no_rope_layers";
  const bool listed = json.Has(kKey);
  if (listed && (!json.Get(kKey).is_array() || json.Get(kKey).size() < config.layer_specs.size())) {
    json.Fail(kKey, fmt::format("a list with one entry for each of {} layers", config.layers));
  }
  const int64_t interval = json.Int("no_rope_layer_interval", 1, int64_t{1} << 20, 4);
  for (int layer = 0; layer < config.layers; ++layer) {
    bool has_rope = (layer + 1) % interval != 0;
    if (listed) {
      const Json& entry = json.Get(kKey)[static_cast<size_t>(layer)];
      if (entry != 0 && entry != 1) json.Fail(kKey, "entries 1 (rope) and 0 (none) only");
      has_rope = entry == 1;
    }
    if (!has_rope) config.layer_specs[layer].rope = {};
  }
}

void ReadSmolLm3(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  ReadLayersWithoutRope(json, config);
  int window = 0;
  if (json.Bool("use_sliding_window", false)) {
    window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  }
  if (ReadLayerTypes(json, window, config)) return;
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.rope.rotary_dim == 0) layer.visibility = cache::SlidingWindow(window);
  }
}

constexpr std::string_view kSmolLm3Defaults = R"({"num_key_value_heads": 4, "max_position_embeddings": 32768,
  "tie_word_embeddings": true, "eos_token_id": 128001, "bos_token_id": 128000})";

}  // namespace

extern const Architecture kSmolLm3 = {.name = "SmolLM3ForCausalLM",
                                      .model_type = "smollm3",
                                      .read_config = ReadSmolLm3,
                                      .defaults = kSmolLm3Defaults,
                                      .rope_theta = 2e6};

}  // namespace kvanta::models
