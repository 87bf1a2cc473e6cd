// Qwen2.5-Omni and Qwen3-Omni: text, images, videos and speech. The language model of the thinker, which answers in
// text, for prompts of text: Qwen2's layers, or Qwen3-MoE's, with a rope of three positions (mrope) that are equal.
// transformers: models/qwen2_5_omni/modeling_qwen2_5_omni.py, models/qwen3_omni_moe/modeling_qwen3_omni_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// In files of the whole model, and of the thinker alone.
void FindThinker(ModelConfig& config) {
  config.names.decoders = {
      {"thinker.model.", "thinker.lm_head"}, {"model.language_model.", "lm_head"}, {"model.", "lm_head"}};
}

void ReadQwen25Omni(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = true;
  ReadQwenWindows(json, config);
  FindThinker(config);
}

void ReadQwen3Omni(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  ReadExpertCounts(json, "num_experts", "moe_intermediate_size", config);
  ReadSparseLayers(json, config);
  config.moe.norm_topk_prob = json.Bool("norm_topk_prob", true);
  FindThinker(config);
}

constexpr std::string_view kQwen25OmniDefaults = R"({"vocab_size": 152064, "hidden_size": 3584,
  "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
  "max_position_embeddings": 32768, "sliding_window": 32768, "max_window_layers": 28})";

constexpr std::string_view kQwen3OmniDefaults = R"({"vocab_size": 3584, "hidden_size": 2048,
  "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
  "max_position_embeddings": 32768, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})";

}  // namespace

extern const Architecture kQwen25Omni = {.name = "Qwen2_5OmniThinkerForConditionalGeneration",
                                         .model_type = "qwen2_5_omni_thinker",
                                         .read_config = ReadQwen25Omni,
                                         .defaults = kQwen25OmniDefaults,
                                         .rope_theta = 1e6,
                                         .other_name = "Qwen2_5OmniModel Qwen2_5OmniForConditionalGeneration",
                                         .other_model_type = "qwen2_5_omni",
                                         .text_config = "text_config",
                                         .text_model_type = "qwen2_5_omni_text",
                                         .outer_config = "thinker_config"};
extern const Architecture kQwen3Omni = {.name = "Qwen3OmniMoeThinkerForConditionalGeneration",
                                        .model_type = "qwen3_omni_moe_thinker",
                                        .read_config = ReadQwen3Omni,
                                        .defaults = kQwen3OmniDefaults,
                                        .rope_theta = 1e6,
                                        .other_name = "Qwen3OmniMoeForConditionalGeneration",
                                        .other_model_type = "qwen3_omni_moe",
                                        .text_config = "text_config",
                                        .text_model_type = "qwen3_omni_moe_text",
                                        .outer_config = "thinker_config"};

}  // namespace kvanta::models
