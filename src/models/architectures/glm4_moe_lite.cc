// GLM-4.7-Flash: GLM-4.5's experts with DeepSeek's latent attention. transformers:
// models/glm4_moe_lite/modeling_glm4_moe_lite.py.
#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadGlm4MoeLite(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kFirst = "first_k_dense_replace";
  ReadMla(json, config);
  config.mla.rope_interleave = json.Bool("rope_interleave", true);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  if (config.num_nextn_predict_layers > 0) config.names.predictor = kNextnPredictor;
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
  // transformers does not read this key of the published file, which says what is the class's default.
  if (!json.Has("mlp_layer_types") && json.Int(kFirst, 0, int64_t{1} << 20, 1) != 1) {
    json.Fail(kFirst, "1, or mlp_layer_types for other layers of experts");
  }
  ReadMlpLayerTypes(json, 1, config);
}

constexpr std::string_view kGlm4MoeLiteDefaults = R"({"head_dim": 64, "num_key_value_heads": 20, "kv_lora_rank": 512,
  "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
  "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 202752})";

}  // namespace

extern const Architecture kGlm4MoeLite = {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", ReadGlm4MoeLite,
                                          kGlm4MoeLiteDefaults};

}  // namespace kvanta::models
