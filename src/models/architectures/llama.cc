// Llama 2, 3, 3.1 and what shares their shape (SmolLM2, TinyLlama, ...).
// transformers: models/llama/modeling_llama.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadLlama(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
}

constexpr std::string_view kLlamaTextDefaults = R"({"vocab_size": 32000, "hidden_size": 4096,
  "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "eos_token_id": 2,
  "bos_token_id": 1})";

}  // namespace

extern const Architecture kLlama = {.name = "LlamaForCausalLM",
                                    .model_type = "llama",
                                    .read_config = ReadLlama,
                                    .other_name = "LLaMAForCausalLM",
                                    .text_defaults = kLlamaTextDefaults};

}  // namespace kvanta::models
