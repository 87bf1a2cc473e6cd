// GPT-2 and GPT-BigCode: learned positions, LayerNorm, q, k and v in one matrix, an MLP of GELU without a gate;
// matrices are stored [in][out]. transformers: models/gpt2/modeling_gpt2.py,
// models/gpt_bigcode/modeling_gpt_bigcode.py.
#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
void RenameGpt2Keys(Json& keys) {
  RemoveHeadKeys(keys);
  RenameKey(keys, "n_embd", "hidden_size");
  RenameKey(keys, "n_layer", "num_hidden_layers");
  RenameKey(keys, "n_head", "num_attention_heads");
  RenameKey(keys, "n_positions", "max_position_embeddings");
  RenameKey(keys, "n_inner", "intermediate_size");
  SetFourfoldMlp(keys);
}

namespace {

void ReadGpt2(const JsonObject& json, ModelConfig& config) {
  if (!json.Bool("scale_attn_weights", true)) json.Fail("scale_attn_weights", "true");
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
    if (json.Bool(key, false)) json.Fail(key, "false");
  }
  config.max_position = ReadMaxPosition(json);
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_epsilon", 0, 1);
  config.qkv_layout = QkvLayout::kConcatenated;
  config.qkv_bias = config.o_bias = config.mlp.bias = true;
  TensorNames& names = config.names;
  TensorNames::Decoder gpt2{.lm_head = "lm_head", .embedding = "wte", .layers = "h", .transposed = true};
  for (const char* prefix : {"transformer.", ""}) {
    gpt2.prefix = prefix;
    names.decoders.insert(names.decoders.end() - 1, gpt2);  // the last one is that of GGUF files
  }
  names.positions = "wpe";
  names.pre_attention_norm = "ln_1";
  names.pre_mlp_norm = "ln_2";
  names.final_norm = "ln_f";
  names.attention = "attn";
  names.qkv = "c_attn";
  names.attention_out = names.down = "c_proj";
  names.up = "c_fc";
}

// GPT-BigCode: GPT-2 with one KV head, whose matrices are stored [out][in]; or with one for each head.
void ReadGptBigCode(const JsonObject& json, ModelConfig& config) {
  ReadGpt2(json, config);
  const bool multi_query = json.Bool("multi_query", true);
  config.kv_heads = multi_query ? 1 : config.heads;
  if (!multi_query) config.qkv_layout = QkvLayout::kByKvHead;
  for (TensorNames::Decoder& decoder : config.names.decoders) decoder.transposed = false;
}

constexpr std::string_view kGpt2Defaults = R"({"vocab_size": 50257, "hidden_size": 768, "intermediate_size": 3072,
  "num_hidden_layers": 12, "num_attention_heads": 12, "activation_function": "gelu_new",
  "max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": true, "eos_token_id": 50256,
  "bos_token_id": 50256})";

constexpr std::string_view kGptBigCodeDefaults = R"({"vocab_size": 50257, "hidden_size": 768,
  "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
  "activation_function": "gelu_pytorch_tanh", "max_position_embeddings": 1024, "layer_norm_epsilon": 1e-5,
  "tie_word_embeddings": true, "eos_token_id": 50256, "bos_token_id": 50256})";

}  // namespace

extern const Architecture kGpt2 = {.name = "GPT2LMHeadModel",
                                   .model_type = "gpt2",
                                   .read_config = ReadGpt2,
                                   .defaults = kGpt2Defaults,
                                   .activation_key = "activation_function",
                                   .reads_rope = true,
                                   .other_name = "GPT2Model",
                                   .ungated_mlp = true,
                                   .rename_keys = RenameGpt2Keys};

extern const Architecture kGptBigCode = {.name = "GPTBigCodeForCausalLM",
                                         .model_type = "gpt_bigcode",
                                         .read_config = ReadGptBigCode,
                                         .defaults = kGptBigCodeDefaults,
                                         .activation_key = "activation_function",
                                         .reads_rope = true,
                                         .other_name = "GPTBigCodeModel",
                                         .ungated_mlp = true,
                                         .rename_keys = RenameGpt2Keys};

}  // namespace kvanta::models
