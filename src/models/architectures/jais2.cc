// Jais 2: Llama with LayerNorm, an MLP of squared ReLU without a gate, and biases. transformers:
// models/jais2/modeling_jais2.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadJais2(const JsonObject& json, ModelConfig& config) {
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_eps", 0, 1);
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", true);
  config.mlp.bias = json.Bool("mlp_bias", true);
}

constexpr std::string_view kJais2Defaults = R"({"vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624,
  "num_hidden_layers": 32, "num_attention_heads": 26, "hidden_act": "relu2", "max_position_embeddings": 8192,
  "layer_norm_eps": 1e-5, "eos_token_id": 150024, "bos_token_id": 0})";

}  // namespace

extern const Architecture kJais2 = {.name = "Jais2ForCausalLM",
                                    .model_type = "jais2",
                                    .read_config = ReadJais2,
                                    .defaults = kJais2Defaults,
                                    .ungated_mlp = true};

}  // namespace kvanta::models
