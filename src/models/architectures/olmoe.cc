// OLMoE and FlexOlmo: experts in all layers, norms of q and k over all heads together. FlexOlmo has OLMo 2's norms
// after the blocks. transformers: models/olmoe/modeling_olmoe.py, models/flex_olmo/modeling_flex_olmo.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadOlmoe(const JsonObject& json, ModelConfig& config) {
  if (json.Has("clip_qkv")) json.Fail("clip_qkv", "null: q, k and v are not clipped");
  config.qk_norm = QkNorm::kAllHeads;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  MarkSparseLayers(0, config);
  ReadExpertCounts(json, "num_experts", "intermediate_size", config);
  config.moe.norm_topk_prob = json.Bool("norm_topk_prob", false);
}

void ReadFlexOlmo(const JsonObject& json, ModelConfig& config) {
  ReadOlmoe(json, config);
  config.names.pre_attention_norm = config.names.pre_mlp_norm = "";
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.post_mlp_norm = "post_feedforward_layernorm";
}

constexpr std::string_view kOlmoeDefaults = R"({"num_experts": 64, "num_experts_per_tok": 8, "intermediate_size": 2048,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "eos_token_id": 50279})";
constexpr std::string_view kFlexOlmoDefaults = R"({"num_experts": 7, "num_experts_per_tok": 5,
  "intermediate_size": 11008, "max_position_embeddings": 4096, "eos_token_id": 100257})";

}  // namespace

extern const Architecture kOlmoe = {"OlmoeForCausalLM", "olmoe", ReadOlmoe, kOlmoeDefaults};
extern const Architecture kFlexOlmo = {.name = "FlexOlmoForCausalLM",
                                       .model_type = "flex_olmo",
                                       .read_config = ReadFlexOlmo,
                                       .defaults = kFlexOlmoDefaults,
                                       .rope_theta = 5e5};

}  // namespace kvanta::models
