// Code World Model: Llama with windows in all but every fourth layer, from the first on.
// transformers: models/cwm/modeling_cwm.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadCwm(const JsonObject& json, ModelConfig& config) {
  constexpr size_t kPattern = 4;
  config.mlp.bias = json.Bool("mlp_bias", false);
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27));
  if (ReadLayerTypes(json, window, config)) return;
  for (size_t layer = 0; layer < config.layer_specs.size(); ++layer) {
    if (layer % kPattern != 0) config.layer_specs[layer].visibility = cache::SlidingWindow(window);
  }
}

constexpr std::string_view kCwmDefaults = R"({"vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504,
  "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 131072, "sliding_window": 8192, "eos_token_id": [128001, 128008, 128009],
  "bos_token_id": 128000})";

constexpr std::string_view kCwmRope = R"({"rope_type": "llama3", "rope_theta": 1e6, "factor": 16, "low_freq_factor": 1,
  "high_freq_factor": 4, "original_max_position_embeddings": 8192})";

}  // namespace

extern const Architecture kCwm = {.name = "CwmForCausalLM",
                                  .model_type = "cwm",
                                  .read_config = ReadCwm,
                                  .defaults = kCwmDefaults,
                                  .rope_theta = 1e6,
                                  .default_rope = kCwmRope};

}  // namespace kvanta::models
