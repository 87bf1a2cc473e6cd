// Helium: Llama with heads rotated in pairs of neighbours. transformers: models/helium/modeling_helium.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadHelium(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = json.Bool("attention_bias", false);  // the output projection has none
  config.mlp.bias = json.Bool("mlp_bias", false);
  for (LayerSpec& layer : config.layer_specs) layer.rope.interleaved = true;
}

constexpr std::string_view kHeliumDefaults = R"({"vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040,
  "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128,
  "max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kHelium = {.name = "HeliumForCausalLM",
                                     .model_type = "helium",
                                     .read_config = ReadHelium,
                                     .defaults = kHeliumDefaults,
                                     .rope_theta = 1e5};

}  // namespace kvanta::models
