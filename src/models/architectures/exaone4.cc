// EXAONE 4.0: norms after the blocks in place of before, and of each head's q and k. The larger models have windows in
// most layers, and rope in these alone. transformers: models/exaone4/modeling_exaone4.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadExaone4(const JsonObject& json, ModelConfig& config) {
  config.names.pre_attention_norm = config.names.pre_mlp_norm = "";
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.post_mlp_norm = "post_feedforward_layernorm";
  config.qk_norm = QkNorm::kPerHead;
  if (!json.Has("sliding_window")) {
    ReadLayerTypes(json, 0, config);
    return;
  }
  // A pattern in letters ("LLLG") always comes with layer_types, and is not a number.
  const int pattern = json.Has("layer_types") ? 1 : static_cast<int>(json.Int("sliding_window_pattern", 1, 4096));
  ReadAlternatingWindows(json, pattern, config);
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.visibility.IsFull()) layer.rope = {};
  }
}

constexpr std::string_view kExaone4Defaults = R"({"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 2048, "sliding_window": 4096, "sliding_window_pattern": 4, "eos_token_id": 2,
  "bos_token_id": 0})";

}  // namespace

// The language model of EXAONE 4.5 has the other model_type in its first files.
extern const Architecture kExaone4 = {.name = "Exaone4ForCausalLM",
                                      .model_type = "exaone4",
                                      .read_config = ReadExaone4,
                                      .defaults = kExaone4Defaults,
                                      .other_model_type = "exaone4_5_text"};

}  // namespace kvanta::models
