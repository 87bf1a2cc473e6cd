// Hunyuan without experts: Llama with norms of each head's q and k after RoPE, and a base of its frequencies that
// `alpha` stretches. transformers: models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py.
#include <cmath>

#include "models/architecture.h"

namespace kvanta::models {
namespace {

// NTK-aware scaling with a fixed factor: the same for all lengths, though checkpoints call it "dynamic".
void StretchBase(const JsonObject& json, ModelConfig& config) {
  const bool has_scaling = json.Has("rope_scaling") && !json.Object("rope_scaling").Value().empty();
  const std::string_view key = has_scaling ? "rope_scaling" : "rope_parameters";
  if (!json.Has(key)) return;
  const JsonObject rope = json.Object(key);
  if (rope.String(rope.Has("rope_type") ? "rope_type" : "type", "default") != "dynamic") return;
  const double alpha = rope.Number("alpha", 0, 1e9, 0);
  if (alpha == 0) return;
  if (config.head_dim <= 2) json.Fail("head_dim", "more than 2, to be rotated with an alpha");
  const double dim = config.head_dim;
  for (LayerSpec& layer : config.layer_specs) layer.rope.theta *= std::pow(alpha, dim / (dim - 2));
}

void ReadHunYuanDense(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHeadAfterRope;
  config.names.q_norm = "query_layernorm";
  config.names.k_norm = "key_layernorm";
  StretchBase(json, config);
}

constexpr std::string_view kHunYuanDefaults = R"({"vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008,
  "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
  "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kHunYuanDense = {"HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", ReadHunYuanDense,
                                           kHunYuanDefaults};

}  // namespace kvanta::models
