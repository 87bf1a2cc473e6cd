// GLM-4: heads that are rotated by half, in pairs of neighbours; gate and up in one matrix. The class Glm4 (since
// GLM-4-0414) has norms around both blocks as well. GLM-4.1V and GLM-4.6V-Flash: the language model alone, which is the
// latter with a rope of three positions (mrope). Those of text are equal, so that the rope is the plain one.
// transformers: models/glm/modeling_glm.py, models/glm4/modeling_glm4.py, models/glm4v/modeling_glm4v.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadGlm(const JsonObject& json, ModelConfig& config) {
  config.mlp.kind = MlpKind::kFusedGate;
  config.qkv_bias = json.Bool("attention_bias", true);
  for (LayerSpec& layer : config.layer_specs) layer.rope.interleaved = true;
}

void ReadGlm4(const JsonObject& json, ModelConfig& config) {
  ReadGlm(json, config);
  config.names.post_attention_norm = "post_self_attn_layernorm";
  config.names.pre_mlp_norm = "post_attention_layernorm";
  config.names.post_mlp_norm = "post_mlp_layernorm";
}

void ReadGlm4v(const JsonObject& json, ModelConfig& config) {
  if (!json.Bool("attention_bias", true)) json.Fail("attention_bias", "true");  // the class does not read it
  ReadGlm4(json, config);
  config.names.decoders = {{"model.language_model.", "lm_head"}};
}

constexpr std::string_view kDefaults = R"({"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
  "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "eos_token_id": [151329, 151336, 151338]})";

constexpr std::string_view kGlm4vDefaults = R"({"vocab_size": 151552, "hidden_size": 4096,
  "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2,
  "max_position_embeddings": 32768, "rms_norm_eps": 1e-5})";

}  // namespace

extern const Architecture kGlm = {.name = "GlmForCausalLM",
                                  .model_type = "glm",
                                  .read_config = ReadGlm,
                                  .defaults = kDefaults,
                                  .partial_rotary = true};
extern const Architecture kGlm4 = {.name = "Glm4ForCausalLM",
                                   .model_type = "glm4",
                                   .read_config = ReadGlm4,
                                   .defaults = kDefaults,
                                   .partial_rotary = true};
extern const Architecture kGlm4v = {.name = "Glm4vForConditionalGeneration",
                                    .model_type = "glm4v",
                                    .read_config = ReadGlm4v,
                                    .defaults = kGlm4vDefaults,
                                    .partial_rotary = true,
                                    .text_config = "text_config",
                                    .text_model_type = "glm4v_text"};
extern const Architecture kGlm46v = {.name = "Glm46VForConditionalGeneration",
                                     .model_type = "glm46v",
                                     .read_config = ReadGlm4v,
                                     .defaults = kGlm4vDefaults,
                                     .partial_rotary = true,
                                     .text_config = "text_config",
                                     .text_model_type = "glm4v_text"};

}  // namespace kvanta::models
