// GLM-4.5 and later: partly rotated heads, optional q/k norms, experts with shared ones after the first dense layers.
// GLM-4.5V: the language model alone, whose rope of three positions (mrope) is the plain one for text, since these are
// equal. transformers: models/glm4_moe/modeling_glm4_moe.py, models/glm4v_moe/modeling_glm4v_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadGlm4Moe(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = json.Bool("attention_bias", false);
  if (json.Bool("use_qk_norm", false)) config.qk_norm = QkNorm::kPerHead;
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  if (config.num_nextn_predict_layers > 0) config.names.predictor = kNextnPredictor;
  MarkSparseLayers(json.Int("first_k_dense_replace", 0, config.layers, 1), config);
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
}

void ReadGlm4vMoe(const JsonObject& json, ModelConfig& config) {
  if (json.Bool("use_qk_norm", false)) json.Fail("use_qk_norm", "false");  // the class has no such norms
  ReadGlm4Moe(json, config);
  config.names.decoders = {{"model.language_model.", "lm_head"}};
}

constexpr std::string_view kGlm4MoeDefaults =
    R"({"num_key_value_heads": 8, "n_routed_experts": 128, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "moe_intermediate_size": 1408, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5})";

constexpr std::string_view kGlm4vMoeDefaults = R"({"vocab_size": 151424, "hidden_size": 4096,
  "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
  "attention_bias": true, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1,
  "moe_intermediate_size": 1408, "rms_norm_eps": 1e-5, "max_position_embeddings": 65536,
  "partial_rotary_factor": 0.5})";

}  // namespace

extern const Architecture kGlm4Moe = {.name = "Glm4MoeForCausalLM",
                                      .model_type = "glm4_moe",
                                      .read_config = ReadGlm4Moe,
                                      .defaults = kGlm4MoeDefaults,
                                      .partial_rotary = true};
extern const Architecture kGlm4vMoe = {.name = "Glm4vMoeForConditionalGeneration",
                                       .model_type = "glm4v_moe",
                                       .read_config = ReadGlm4vMoe,
                                       .defaults = kGlm4vMoeDefaults,
                                       .partial_rotary = true,
                                       .text_config = "text_config",
                                       .text_model_type = "glm4v_moe_text"};

}  // namespace kvanta::models
