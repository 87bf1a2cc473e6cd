// Qwen3-VL with experts: the language model, which is Qwen3-MoE with a rope of three positions (mrope). Those of text
// are equal, so that the rope is the plain one. transformers: models/qwen3_vl_moe/modeling_qwen3_vl_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadQwen3VlMoe(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  const char* experts = json.Has("num_local_experts") ? "num_local_experts" : "num_experts";
  ReadExpertCounts(json, experts, "moe_intermediate_size", config);
  ReadSparseLayers(json, config);
  if (!json.Bool("norm_topk_prob", true)) json.Fail("norm_topk_prob", "true");  // the class does not read it
  config.moe.norm_topk_prob = true;
  config.names.expert_order =
      ExpertOrder::kByShape;  // the hub's have [in][out], those that transformers saves [out][in]
  config.names.decoders = {{"model.language_model.", "lm_head"}};
}

constexpr std::string_view kQwen3VlMoeDefaults = R"({"vocab_size": 151936, "hidden_size": 2048,
  "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
  "max_position_embeddings": 128000, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408})";

}  // namespace

extern const Architecture kQwen3VlMoe = {.name = "Qwen3VLMoeForConditionalGeneration",
                                         .model_type = "qwen3_vl_moe",
                                         .read_config = ReadQwen3VlMoe,
                                         .defaults = kQwen3VlMoeDefaults,
                                         .rope_theta = 5e5,
                                         .text_config = "text_config",
                                         .text_model_type = "qwen3_vl_moe_text"};

}  // namespace kvanta::models
