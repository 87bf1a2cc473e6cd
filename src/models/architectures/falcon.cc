// Falcon: LayerNorm, q, k and v in one matrix, attention and MLP side by side, an MLP of GELU without a gate. The 7B
// has one KV head; the 40B and 180B ("new decoder architecture") have groups of heads, and a norm for each block.
// transformers: models/falcon/modeling_falcon.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void RenameFalconKeys(Json& keys) {
  RenameKey(keys, "n_embed", "hidden_size");
  RenameKey(keys, "n_layer", "num_hidden_layers");
  RenameKey(keys, "n_head", "num_attention_heads");
  RenameKey(keys, "n_head_kv", "num_kv_heads");
  RenameKey(keys, "ffn_hidden_size", "intermediate_size");
  SetFourfoldMlp(keys);
  RemoveHeadKeys(keys);
  const auto is_true = [&](const char* key, bool missing) {
    return keys.contains(key) && !keys[key].is_null() ? keys[key] == true : missing;
  };
  if (is_true("new_decoder_architecture", false)) {
    RenameKey(keys, "num_kv_heads", "num_key_value_heads");
  } else if (is_true("multi_query", true)) {
    keys["num_key_value_heads"] = 1;
  }
}

void ReadFalcon(const JsonObject& json, ModelConfig& config) {
  if (json.Bool("alibi", false)) json.Fail("alibi", "false");
  const bool is_new = json.Bool("new_decoder_architecture", false), is_parallel = json.Bool("parallel_attn", true);
  if (is_new && !is_parallel) json.Fail("parallel_attn", "true, as in all of the new decoder architecture");
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_epsilon", 0, 1);
  config.parallel_blocks = is_parallel;
  config.qkv_layout = QkvLayout::kByKvHead;
  config.qkv_bias = config.o_bias = config.mlp.bias = json.Bool("bias", false);
  TensorNames& names = config.names;
  // The last one is that of GGUF files.
  names.decoders = {{"transformer.", "lm_head", "word_embeddings", "h"}, {"", "lm_head", "word_embeddings", "h"}, {}};
  const int64_t norms = is_new ? json.Int("num_ln_in_parallel_attn", 1, 2, 2) : 1;
  if (norms == 2) {
    names.pre_attention_norm = "ln_attn";
    names.pre_mlp_norm = "ln_mlp";
  } else if (config.parallel_blocks) {
    names.pre_mlp_norm = "";
  }
  names.final_norm = "ln_f";
  names.attention = "self_attention";
  names.qkv = "query_key_value";
  names.attention_out = "dense";
  names.up = "dense_h_to_4h";
  names.down = "dense_4h_to_h";
}

constexpr std::string_view kFalconDefaults = R"({"vocab_size": 65024, "hidden_size": 4544, "intermediate_size": 18176,
  "num_hidden_layers": 32, "num_attention_heads": 71, "activation": "gelu", "max_position_embeddings": 2048,
  "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true, "eos_token_id": 11, "bos_token_id": 11})";

}  // namespace

extern const Architecture kFalcon = {.name = "FalconForCausalLM",
                                     .model_type = "falcon",
                                     .read_config = ReadFalcon,
                                     .defaults = kFalconDefaults,
                                     .activation_key = "activation",
                                     .ungated_mlp = true,
                                     .rename_keys = RenameFalconKeys};

}  // namespace kvanta::models
