// Granite 3: Llama with a factor for embeddings, attention logits, what blocks add, and output logits.
// transformers: models/granite/modeling_granite.py.
#include "models/architecture.h"

namespace kvanta::models {
void ReadGranite(const JsonObject& json, ModelConfig& config) {
  ReadGraniteFactors(json, config);
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
}

void ReadGraniteFactors(const JsonObject& json, ModelConfig& config) {
  const auto factor = [&](const char* key) { return json.Number(key, 1e-6, 1e6, 1); };
  config.embedding_scale = factor("embedding_multiplier");
  config.softmax_scale = factor("attention_multiplier");
  config.residual_scale = factor("residual_multiplier");
  config.logits_divisor = factor("logits_scaling");
}

extern const Architecture kGranite = {"GraniteForCausalLM", "granite", ReadGranite,
                                      R"({"eos_token_id": 2, "bos_token_id": 1})"};

}  // namespace kvanta::models
