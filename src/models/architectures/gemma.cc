// Gemma: Llama with GeGLU, scaled embeddings and norm weights around zero. Gemma 2 and 3: norms around both blocks,
// layers with and without a sliding window. Gemma 2 has softcaps of logits, and
// VaultGemma is Gemma 2 without the norms after the blocks; Gemma 3 has q/k norms, and another rope in
// layers with a window, and may attend in both directions (EmbeddingGemma). transformers:
// models/gemma/modeling_gemma.py, models/gemma2/modeling_gemma2.py, models/gemma3/modeling_gemma3.py (the language
// model).
#include <cmath>

#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

constexpr const char* kBothDirections = "use_bidirectional_attention";

void RefuseBothDirections(const JsonObject& json) {
  if (json.Bool(kBothDirections, false)) {
    json.Fail(kBothDirections, "false: only Gemma3TextModel attends in both directions");
  }
}

// All generations.
void ReadAnyGemma(const JsonObject& json, ModelConfig& config) {
  config.norm_weight_offset = 1;
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden));
  config.embedding_scale_rounded = true;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
}

void ReadGemma(const JsonObject& json, ModelConfig& config) {
  RefuseBothDirections(json);
  ReadAnyGemma(json, config);
}

// Gemma 2 and 3.
void ReadLaterGemma(const JsonObject& json, ModelConfig& config) {
  ReadAnyGemma(json, config);
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.pre_mlp_norm = "pre_feedforward_layernorm";
  config.names.post_mlp_norm = "post_feedforward_layernorm";
  config.softmax_scale = 1 / std::sqrt(json.Number("query_pre_attn_scalar", 1, 1e6));
  config.attn_logit_softcapping = json.Number("attn_logit_softcapping", 1e-3, 1e6, 0);
  config.final_logit_softcapping = json.Number("final_logit_softcapping", 1e-3, 1e6, 0);
}

void ReadVaultGemma(const JsonObject& json, ModelConfig& config) {
  RefuseBothDirections(json);
  ReadLaterGemma(json, config);
  config.names.post_attention_norm = config.names.post_mlp_norm = "";
  ReadAlternatingWindows(json, 2, config);
}

void ReadGemma2(const JsonObject& json, ModelConfig& config) {
  RefuseBothDirections(json);
  ReadLaterGemma(json, config);
  ReadAlternatingWindows(json, 2, config);
}

// Ropes of both generations: rope_parameters by layer type; or rope_theta and rope_scaling for full attention, and
// rope_local_base_freq for windows.
void ReadGemma3Ropes(const JsonObject& json, ModelConfig& config) {
  constexpr double kGlobalTheta = 1e6, kLocalTheta = 1e4;
  config.max_position = ReadMaxPosition(json);  // scaling is included
  RopeSpec global, local;
  const double local_theta = ReadTheta(json, "rope_local_base_freq", kLocalTheta);
  if (HasRopesByLayerType(json)) {
    const double global_theta = ReadTheta(json, "rope_theta", kGlobalTheta);
    global = ReadRopeOfLayers(json, "full_attention", config.head_dim, config.max_position, global_theta);
    local = ReadRopeOfLayers(json, "sliding_attention", config.head_dim, config.max_position, local_theta);
  } else {
    global = ReadRopeSpec(json, config.head_dim, config.max_position, kGlobalTheta);
    local = {.rotary_dim = config.head_dim, .theta = local_theta, .original_max_position = config.max_position};
  }
  for (LayerSpec& layer : config.layer_specs) layer.rope = layer.visibility.IsFull() ? global : local;
}

// EmbeddingGemma: the key `sliding_window` counts tokens on both sides of the query, and it.
void AttendInBothDirections(ModelConfig& config) {
  for (LayerSpec& layer : config.layer_specs) {
    layer.visibility.both_directions = true;
    if (!layer.visibility.IsFull()) layer.visibility.span = layer.visibility.span / 2 + 1;
  }
  config.has_lm_head = false;
}

void ReadGemma3(const JsonObject& json, ModelConfig& config) {
  ReadLaterGemma(json, config);
  // transformers reads the key, and does not apply it in the attention of Gemma 3.
  config.attn_logit_softcapping = 0;
  config.qk_norm = QkNorm::kPerHead;
  ReadAlternatingWindows(json, static_cast<int>(json.Int("sliding_window_pattern", 1, 4096, 6)), config);
  ReadGemma3Ropes(json, config);
  if (json.Bool(kBothDirections, false)) AttendInBothDirections(config);
}

// Text and vision: the language model alone, for prompts of text. Its tensors' prefix depends on the version of
// transformers that saved them.
void ReadGemma3Multimodal(const JsonObject& json, ModelConfig& config) {
  RefuseBothDirections(json);
  ReadGemma3(json, config);
  config.names.decoders = {{"language_model.model.", "language_model.lm_head"}, {"model.language_model.", "lm_head"}};
}

constexpr std::string_view kGemmaDefaults = R"({"vocab_size": 256000, "hidden_size": 3072,
  "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
  "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "tie_word_embeddings": true,
  "eos_token_id": 1, "bos_token_id": 2})";

constexpr std::string_view kGemma2Defaults = R"({"vocab_size": 256000, "num_attention_heads": 8,
  "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
  "max_position_embeddings": 8192, "tie_word_embeddings": true, "query_pre_attn_scalar": 256, "sliding_window": 4096,
  "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "eos_token_id": 1, "bos_token_id": 2})";

constexpr std::string_view kGemma3Defaults = R"({"vocab_size": 262208, "hidden_size": 2304,
  "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
  "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
  "max_position_embeddings": 131072, "tie_word_embeddings": true, "query_pre_attn_scalar": 256,
  "sliding_window": 4096, "eos_token_id": 1, "bos_token_id": 2})";

}  // namespace

extern const Architecture kGemma = {.name = "GemmaForCausalLM",
                                    .model_type = "gemma",
                                    .read_config = ReadGemma,
                                    .defaults = kGemmaDefaults,
                                    .gelu_is_tanh = true};
extern const Architecture kGemma2 = {"Gemma2ForCausalLM", "gemma2", ReadGemma2, kGemma2Defaults, "hidden_activation"};
extern const Architecture kVaultGemma = {"VaultGemmaForCausalLM", "vaultgemma", ReadVaultGemma, kGemma2Defaults,
                                         "hidden_activation"};
extern const Architecture kGemma3 = {.name = "Gemma3ForCausalLM",
                                     .model_type = "gemma3_text",
                                     .read_config = ReadGemma3,
                                     .defaults = kGemma3Defaults,
                                     .activation_key = "hidden_activation",
                                     .reads_rope = true,
                                     .other_name = "Gemma3TextModel"};
extern const Architecture kGemma3Multimodal = {.name = "Gemma3ForConditionalGeneration",
                                               .model_type = "gemma3",
                                               .read_config = ReadGemma3Multimodal,
                                               .activation_key = "hidden_activation",
                                               .reads_rope = true,
                                               .text_config = "text_config",
                                               .text_model_type = "gemma3_text"};

}  // namespace kvanta::models
