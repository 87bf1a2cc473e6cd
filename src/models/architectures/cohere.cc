// Command R: LayerNorm without biases, attention and MLP side by side, heads rotated in pairs of neighbours, a factor
// of the output logits. Command R7B and Command A (the class Cohere2): windows in most layers, and rope in these alone.
// transformers: models/cohere/modeling_cohere.py, models/cohere2/modeling_cohere2.py.
#include <algorithm>

#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
void ReadCohereBlocks(const JsonObject& json, ModelConfig& config) {
  config.norm = NormKind::kLayer;
  config.parallel_blocks = true;
  config.rms_eps = json.Number("layer_norm_eps", 0, 1);
  config.names.pre_mlp_norm = "";
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.logits_divisor = 1 / json.Number("logit_scale", 1e-6, 1e6);
  for (LayerSpec& layer : config.layer_specs) layer.rope.interleaved = true;
}

namespace {

void ReadCohere(const JsonObject& json, ModelConfig& config) {
  ReadCohereBlocks(json, config);
  // The first Command R was trained on longer texts than max_position_embeddings says.
  config.max_position =
      std::max(config.max_position, json.Int("model_max_length", 1, kMaxPositions, config.max_position));
  if (json.BoolOrNull("use_qk_norm", false)) config.qk_norm = QkNorm::kOwnWeights;
}

void ReadCohere2(const JsonObject& json, ModelConfig& config) {
  ReadCohereBlocks(json, config);
  ReadAlternatingWindows(json, static_cast<int>(json.Int("sliding_window_pattern", 1, 4096, 4)), config);
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.visibility.IsFull()) layer.rope = {};
  }
}

constexpr std::string_view kCohereDefaults = R"({"vocab_size": 256000, "hidden_size": 8192,
  "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64, "layer_norm_eps": 1e-5,
  "logit_scale": 0.0625, "max_position_embeddings": 8192, "tie_word_embeddings": true, "eos_token_id": 255001,
  "bos_token_id": 5})";
constexpr std::string_view kCohere2Defaults = R"({"vocab_size": 256000, "hidden_size": 8192,
  "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64, "layer_norm_eps": 1e-5,
  "logit_scale": 0.0625, "max_position_embeddings": 8192, "tie_word_embeddings": true, "sliding_window": 4096,
  "eos_token_id": 255001, "bos_token_id": 5})";

}  // namespace

extern const Architecture kCohere = {.name = "CohereForCausalLM",
                                     .model_type = "cohere",
                                     .read_config = ReadCohere,
                                     .defaults = kCohereDefaults,
                                     .rope_theta = 5e5};
extern const Architecture kCohere2 = {"Cohere2ForCausalLM", "cohere2", ReadCohere2, kCohere2Defaults};

}  // namespace kvanta::models
