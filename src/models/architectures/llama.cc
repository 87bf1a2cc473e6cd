// Llama 2, 3, 3.1 and what shares their shape (SmolLM2, TinyLlama, ...).
// transformers: models/llama/modeling_llama.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadLlama(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
}

}  // namespace

extern const Architecture kLlama = {"LlamaForCausalLM", "llama", ReadLlama};

}  // namespace kvanta::models
