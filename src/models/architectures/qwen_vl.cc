// Qwen2-VL, Qwen2.5-VL and Qwen3-VL: text and vision, with Qwen2's or Qwen3's layers. The language model alone, for
// prompts of text: the three positions of a token are the same, and mrope is the default rope. transformers:
// models/qwen2_vl/modeling_qwen2_vl.py, models/qwen2_5_vl/modeling_qwen2_5_vl.py, models/qwen3_vl/modeling_qwen3_vl.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadQwen2Vl(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = true;
  ReadQwenWindows(json, config);
  // The first checkpoints have the language model's tensors next to those of vision, "visual.".
  config.names.decoders = {{"model.language_model.", "lm_head"}, {"model.", "lm_head"}};
}

void ReadQwen3Vl(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  config.names.decoders = {{"model.language_model.", "lm_head"}};
}

constexpr std::string_view kQwen2VlDefaults = R"({"vocab_size": 152064, "hidden_size": 8192,
  "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 80,
  "eos_token_id": 151645, "bos_token_id": 151643})";

constexpr std::string_view kQwen3VlDefaults = R"({"vocab_size": 151936, "hidden_size": 4096,
  "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
  "head_dim": 128, "max_position_embeddings": 128000})";

}  // namespace

extern const Architecture kQwen2Vl = {.name = "Qwen2VLForConditionalGeneration",
                                      .model_type = "qwen2_vl",
                                      .read_config = ReadQwen2Vl,
                                      .defaults = kQwen2VlDefaults,
                                      .rope_theta = 1e6,
                                      .text_config = "text_config",
                                      .text_model_type = "qwen2_vl_text",
                                      .text_config_optional = true};
extern const Architecture kQwen25Vl = {.name = "Qwen2_5_VLForConditionalGeneration",
                                       .model_type = "qwen2_5_vl",
                                       .read_config = ReadQwen2Vl,
                                       .defaults = kQwen2VlDefaults,
                                       .rope_theta = 1e6,
                                       .text_config = "text_config",
                                       .text_model_type = "qwen2_5_vl_text",
                                       .text_config_optional = true};
extern const Architecture kQwen3Vl = {.name = "Qwen3VLForConditionalGeneration",
                                      .model_type = "qwen3_vl",
                                      .read_config = ReadQwen3Vl,
                                      .defaults = kQwen3VlDefaults,
                                      .rope_theta = 5e5,
                                      .text_config = "text_config",
                                      .text_model_type = "qwen3_vl_text"};

}  // namespace kvanta::models
