// HyperCLOVA X SEED Think: Granite with norms after both blocks, and a factor that multiplies the output logits.
// transformers: models/hyperclovax/modeling_hyperclovax.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadHyperClovaX(const JsonObject& json, ModelConfig& config) {
  const auto factor = [&](const char* key, double missing) { return json.Number(key, 1e-6, 1e6, missing); };
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  config.embedding_scale = factor("embedding_multiplier", 1);
  config.softmax_scale = factor("attention_multiplier", config.softmax_scale);
  config.residual_scale = factor("residual_multiplier", 1);
  config.logits_divisor = 1 / factor("logits_scaling", 1);
  if (!json.BoolOrNull("use_post_norm", true)) return;
  config.names.post_attention_norm = "post_norm1";
  config.names.post_mlp_norm = "post_norm2";
}

constexpr std::string_view kHyperClovaXDefaults =
    R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
  "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048, "eos_token_id": 2,
  "bos_token_id": 1})";

}  // namespace

extern const Architecture kHyperClovaX = {"HyperCLOVAXForCausalLM", "hyperclovax", ReadHyperClovaX,
                                          kHyperClovaXDefaults};

}  // namespace kvanta::models
