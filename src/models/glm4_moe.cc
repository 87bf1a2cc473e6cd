// GLM-4.5 and later: partly rotated heads, optional q/k norms, experts with shared ones after the first dense layers.
// transformers: models/glm4_moe/modeling_glm4_moe.py.
#include "models/architecture.h"
#include "models/moe_config.h"

namespace kvanta::models {
namespace {

void ReadGlm4Moe(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = json.Bool("attention_bias", false);
  config.qk_norm = json.Bool("use_qk_norm", false);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  MarkSparseLayers(json.Int("first_k_dense_replace", 0, config.layers, 1), config);
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
}

constexpr std::string_view kGlm4MoeDefaults =
    R"({"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "moe_intermediate_size": 1408, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5})";

}  // namespace

extern const Architecture kGlm4Moe = {.name = "Glm4MoeForCausalLM",
                                      .model_type = "glm4_moe",
                                      .read_config = ReadGlm4Moe,
                                      .defaults = kGlm4MoeDefaults,
                                      .partial_rotary = true};

}  // namespace kvanta::models
