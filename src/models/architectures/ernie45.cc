// ERNIE 4.5 without experts: Llama whose heads are rotated in pairs of neighbours.
// transformers: models/ernie4_5/modeling_ernie4_5.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadErnie45(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = config.mlp.bias = json.Bool("use_bias", false);
  for (LayerSpec& layer : config.layer_specs) layer.rope.interleaved = true;
}

constexpr std::string_view kErnie45Defaults = R"({"vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
  "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 131072, "tie_word_embeddings": true, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kErnie45 = {.name = "Ernie4_5ForCausalLM",
                                      .model_type = "ernie4_5",
                                      .read_config = ReadErnie45,
                                      .defaults = kErnie45Defaults,
                                      .rope_theta = 5e5};

}  // namespace kvanta::models
