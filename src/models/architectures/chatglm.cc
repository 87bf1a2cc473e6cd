// ChatGLM2, ChatGLM3 and GLM-4 in the layout of their own code: the arithmetic of GLM (glm.cc) under other names, with
// q, k and v in one matrix. Hugging Face: THUDM/glm-4-9b-chat, modeling_chatglm.py.
#include <string>

#include "models/architecture.h"

namespace kvanta::models {
namespace {

void RenameChatGlmKeys(Json& keys) {
  RenameKey(keys, "num_layers", "num_hidden_layers");
  RenameKey(keys, "ffn_hidden_size", "intermediate_size");
  RenameKey(keys, "kv_channels", "head_dim");
  RenameKey(keys, "multi_query_group_num", "num_key_value_heads");
  RenameKey(keys, "padded_vocab_size", "vocab_size");
  RenameKey(keys, "seq_length", "max_position_embeddings");
  RenameKey(keys, "layernorm_epsilon", "rms_norm_eps");
}

// ChatGLM2-6B-32K divides positions by rope_ratio, ChatGLM3 and GLM-4 multiply the base by it: that is in the code next
// to the weights alone, and the first two have the same keys and sizes.
void ReadRopeRatio(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "rope_ratio";
  constexpr int kVocabOf2And3 = 65024;
  const double ratio = json.Number(kKey, 1e-3, 1e6, 1);
  if (ratio == 1) return;
  const std::string name = json.String("_name_or_path", "");
  const bool is_2 = name.find("chatglm2") != name.npos, is_3 = name.find("chatglm3") != name.npos;
  if (config.vocab == kVocabOf2And3 && is_2 == is_3) {
    json.Fail(kKey,
              "1, or _name_or_path with chatglm2, which divides positions by it, or chatglm3, which multiplies the "
              "base by it");
  }
  for (LayerSpec& layer : config.layer_specs) {
    if (is_2) {
      layer.rope.type = RopeType::kLinear;
      layer.rope.factor = ratio;
    } else {
      layer.rope.theta *= ratio;
    }
  }
}

void ReadChatGlm(const JsonObject& json, ModelConfig& config) {
  for (const char* key : {"rmsnorm", "post_layer_norm", "multi_query_attention", "original_rope"}) {
    if (!json.Bool(key, true)) json.Fail(key, "true");
  }
  for (const char* key : {"apply_residual_connection_post_layernorm", "add_bias_linear"}) {
    if (json.Bool(key, false)) json.Fail(key, "false");
  }
  for (LayerSpec& layer : config.layer_specs) layer.rope.interleaved = true;
  ReadRopeRatio(json, config);
  config.qkv_layout = QkvLayout::kConcatenated;
  config.qkv_bias = json.Bool("add_qkv_bias", false);
  config.mlp.kind = MlpKind::kFusedGate;
  TensorNames& names = config.names;
  names.decoders = {{"transformer.", "transformer.output_layer", "embedding.word_embeddings", "encoder.layers"}};
  names.final_norm = "encoder.final_layernorm";
  names.attention = "self_attention";
  names.qkv = "query_key_value";
  names.attention_out = "dense";
  names.gate_up = "dense_h_to_4h";
  names.down = "dense_4h_to_h";
}

constexpr std::string_view kChatGlmDefaults = R"({"num_attention_heads": 32, "multi_query_attention": true,
  "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "hidden_act": "silu", "eos_token_id": 2})";

}  // namespace

extern const Architecture kChatGlm = {.name = "ChatGLMForConditionalGeneration",
                                      .model_type = "chatglm",
                                      .read_config = ReadChatGlm,
                                      .defaults = kChatGlmDefaults,
                                      .partial_rotary = true,
                                      .other_name = "ChatGLMModel",
                                      .rename_keys = RenameChatGlmKeys};

}  // namespace kvanta::models
