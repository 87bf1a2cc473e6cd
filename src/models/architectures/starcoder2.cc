// StarCoder2: LayerNorm, an MLP of GELU without a gate, biases everywhere. transformers:
// models/starcoder2/modeling_starcoder2.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadStarcoder2(const JsonObject& json, ModelConfig& config) {
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("norm_epsilon", 0, 1);
  config.names.up = "c_fc";
  config.names.down = "c_proj";
  config.qkv_bias = config.o_bias = config.mlp.bias = json.Bool("use_bias", true);
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
}

constexpr std::string_view kStarcoder2Defaults =
    R"({"vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
  "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
  "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "tie_word_embeddings": true, "eos_token_id": 50256,
  "bos_token_id": 50256})";

}  // namespace

extern const Architecture kStarcoder2 = {.name = "Starcoder2ForCausalLM",
                                         .model_type = "starcoder2",
                                         .read_config = ReadStarcoder2,
                                         .defaults = kStarcoder2Defaults,
                                         .ungated_mlp = true};

}  // namespace kvanta::models
