// Llama 2, 3, 3.1 and what shares their shape (SmolLM2, TinyLlama, ...).
// transformers: models/llama/modeling_llama.py.
#include "models/architecture.h"
#include "models/decoder.h"

namespace kvanta::models {
namespace {

void ReadLlama(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp_bias = json.Bool("mlp_bias", false);
}

}  // namespace

const Architecture kLlama = {"LlamaForCausalLM", "llama", 0, ReadLlama, LoadDecoder};

}  // namespace kvanta::models
