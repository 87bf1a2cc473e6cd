// SmolLM3: Llama with layers without rope, every fourth by default. transformers:
// models/smollm3/modeling_smollm3.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadSmolLm3(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  const std::vector<bool> rope = ReadLayersWithRope(json, config.layers);
  for (size_t layer = 0; layer < config.layer_specs.size(); ++layer) {
    if (!rope[layer]) config.layer_specs[layer].rope = {};
  }
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
