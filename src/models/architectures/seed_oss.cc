// Seed-OSS: Llama with biases on q, k and v. transformers: models/seed_oss/modeling_seed_oss.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadSeedOss(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = json.Bool("attention_bias", true);
  config.o_bias = json.Bool("attention_out_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
}

constexpr std::string_view kSeedOssDefaults = R"({"vocab_size": 155136, "hidden_size": 4096, "intermediate_size": 27648,
  "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
  "max_position_embeddings": 524288, "eos_token_id": 2, "bos_token_id": 0})";

}  // namespace

extern const Architecture kSeedOss = {"SeedOssForCausalLM", "seed_oss", ReadSeedOss, kSeedOssDefaults};

}  // namespace kvanta::models
