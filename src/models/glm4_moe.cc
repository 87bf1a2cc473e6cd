// GLM-4.5 and later: partly rotated heads, optional q/k norms, experts with shared ones after the first dense layers.
// transformers: models/glm4_moe/modeling_glm4_moe.py.
#include "models/architecture.h"
#include "models/moe_config.h"

namespace kvanta::models {
namespace {

void ReadGlm4Moe(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kExperts = "n_routed_experts";
  config.qkv_bias = json.Bool("attention_bias", false);
  config.qk_norm = json.Bool("use_qk_norm", false);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  const auto first = static_cast<int>(json.Int("first_k_dense_replace", 0, config.layers, 1));
  for (int layer = first; layer < config.layers; ++layer) config.layer_specs[layer].moe = true;
  ReadExpertCounts(json, kExperts, "moe_intermediate_size", config);
  ReadExpertGroups(json, kExperts, config);
  kernels::MoeConfig& moe = config.moe;
  if (moe.num_experts / moe.n_group < 2) json.Fail("n_group", "groups of at least 2 experts");
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("n_shared_experts", 0, kMaxExperts, 1)) * moe.moe_intermediate_size;
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = true;
  moe.norm_topk_prob = json.Bool("norm_topk_prob", true);
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6, 1.0));
}

constexpr std::string_view kGlm4MoeDefaults =
    R"({"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
  "moe_intermediate_size": 1408, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5})";

}  // namespace

extern const Architecture kGlm4Moe = {.name = "Glm4MoeForCausalLM",
                                      .model_type = "glm4_moe",
                                      .read_config = ReadGlm4Moe,
                                      .defaults = kGlm4MoeDefaults,
                                      .partial_rotary = true};

}  // namespace kvanta::models
