// Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet, then one of attention with a gate on its output; experts with
// a shared one, or dense. transformers: models/qwen3_next/modeling_qwen3_next.py, models/qwen3_5/modeling_qwen3_5.py,
// models/qwen3_5_moe/modeling_qwen3_5_moe.py (the language models).
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadHybrid(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  config.attn_output_gate = OutputGate::kAfterQueries;
  config.norm_weight_offset = 1;
  config.names.predictor = kMtpPredictor;
  ReadGatedDeltaNetLayers(json, config);
}

void ReadExpertSizes(const JsonObject& json, ModelConfig& config) {
  ReadExpertCounts(json, "num_experts", "moe_intermediate_size", config);
  config.moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("shared_expert_intermediate_size", 1, kMaxExpertWidth));
  config.moe.shared_expert_gate = true;
  config.names.shared_expert = "shared_expert";
}

void ReadQwen3Next(const JsonObject& json, ModelConfig& config) {
  ReadHybrid(json, config);
  ReadExpertSizes(json, config);
  ReadSparseLayers(json, config);
  config.moe.norm_topk_prob = json.Bool("norm_topk_prob", true);
}

void ReadQwen35Moe(const JsonObject& json, ModelConfig& config) {
  ReadHybrid(json, config);
  ReadExpertSizes(json, config);
  for (LayerSpec& layer : config.layer_specs) layer.moe = true;
  config.moe.norm_topk_prob = true;
  config.names.expert_order = ExpertOrder::kOutIn;
}

// Text and vision: the language model alone, for prompts of text.
template <void (*kReadConfig)(const JsonObject&, ModelConfig&)>
void ReadMultimodal(const JsonObject& json, ModelConfig& config) {
  kReadConfig(json, config);
  config.names.decoders = {{"model.language_model.", "lm_head"}, {"language_model.model.", "language_model.lm_head"}};
}

constexpr std::string_view kQwen3NextDefaults = R"({"num_key_value_heads": 2, "head_dim": 256,
  "partial_rotary_factor": 0.25, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
  "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
  "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512})";

constexpr std::string_view kQwen35Defaults = R"({"vocab_size": 248320, "hidden_size": 4096,
  "intermediate_size": 12288, "num_hidden_layers": 32, "max_position_embeddings": 32768, "num_attention_heads": 16,
  "num_key_value_heads": 4, "head_dim": 256,
  "partial_rotary_factor": 0.25, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
  "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4})";

constexpr std::string_view kQwen35MoeDefaults = R"({"vocab_size": 248320, "hidden_size": 2048,
  "num_hidden_layers": 40, "max_position_embeddings": 32768, "num_attention_heads": 16, "num_key_value_heads": 2,
  "head_dim": 256,
  "partial_rotary_factor": 0.25, "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
  "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "intermediate_size": 512, "num_experts": 256,
  "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512})";

}  // namespace

extern const Architecture kQwen3Next = {.name = "Qwen3NextForCausalLM",
                                        .model_type = "qwen3_next",
                                        .read_config = ReadQwen3Next,
                                        .defaults = kQwen3NextDefaults,
                                        .partial_rotary = true};
extern const Architecture kQwen35 = {.name = "Qwen3_5ForCausalLM",
                                     .model_type = "qwen3_5_text",
                                     .read_config = ReadHybrid,
                                     .defaults = kQwen35Defaults,
                                     .partial_rotary = true,
                                     .other_model_type = "qwen3_5"};  // as quantizers write it
extern const Architecture kQwen35Multimodal = {.name = "Qwen3_5ForConditionalGeneration",
                                               .model_type = "qwen3_5",
                                               .read_config = ReadMultimodal<ReadHybrid>,
                                               .partial_rotary = true,
                                               .text_config = "text_config",
                                               .text_model_type = "qwen3_5_text"};
extern const Architecture kQwen35Moe = {.name = "Qwen3_5MoeForCausalLM",
                                        .model_type = "qwen3_5_moe_text",
                                        .read_config = ReadQwen35Moe,
                                        .defaults = kQwen35MoeDefaults,
                                        .partial_rotary = true,
                                        .other_model_type = "qwen3_5_moe"};
extern const Architecture kQwen35MoeMultimodal = {.name = "Qwen3_5MoeForConditionalGeneration",
                                                  .model_type = "qwen3_5_moe",
                                                  .read_config = ReadMultimodal<ReadQwen35Moe>,
                                                  .partial_rotary = true,
                                                  .text_config = "text_config",
                                                  .text_model_type = "qwen3_5_moe_text"};

}  // namespace kvanta::models
