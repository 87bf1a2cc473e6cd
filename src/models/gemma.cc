// Gemma 2: norms around both blocks, GeGLU, softcaps of logits, every second layer with a sliding window.
// transformers: models/gemma2/modeling_gemma2.py.
#include <cmath>

#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadGemma(const JsonObject& json, ModelConfig& config) {
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.pre_mlp_norm = "pre_feedforward_layernorm";
  config.names.post_mlp_norm = "post_feedforward_layernorm";
  config.norm_weight_offset = 1;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden));
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.softmax_scale = 1 / std::sqrt(json.Number("query_pre_attn_scalar", 1, 1e6));
  config.attn_logit_softcapping = json.Number("attn_logit_softcapping", 1e-3, 1e6, 0);
  config.final_logit_softcapping = json.Number("final_logit_softcapping", 1e-3, 1e6, 0);
  if (json.Bool("use_bidirectional_attention", false)) json.Fail("use_bidirectional_attention", "false");
}

// Full attention in every `pattern`-th layer, a window in the others, where `layer_types` is absent.
void ReadWindows(const JsonObject& json, int pattern, ModelConfig& config) {
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27));
  if (ReadLayerTypes(json, window, config)) return;
  for (int layer = 0; layer < config.layers; ++layer) {
    if ((layer + 1) % pattern != 0) config.layer_specs[layer].visibility = cache::SlidingWindow(window);
  }
}

void ReadGemma2(const JsonObject& json, ModelConfig& config) {
  ReadGemma(json, config);
  ReadWindows(json, 2, config);
}

constexpr std::string_view kGemma2Defaults = R"({"vocab_size": 256000, "num_attention_heads": 8,
  "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
  "max_position_embeddings": 8192, "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
  "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "eos_token_id": 1, "bos_token_id": 2})";

}  // namespace

extern const Architecture kGemma2 = {"Gemma2ForCausalLM", "gemma2", ReadGemma2, kGemma2Defaults, "hidden_activation"};

}  // namespace kvanta::models
