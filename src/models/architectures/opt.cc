// OPT: learned positions, LayerNorm, an MLP of ReLU without a gate. transformers: models/opt/modeling_opt.py.
#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

void RenameOptKeys(Json& keys) {
  RemoveHeadKeys(keys);
  RenameKey(keys, "ffn_dim", "intermediate_size");
}

void ReadOpt(const JsonObject& json, ModelConfig& config) {
  for (const char* key : {"do_layer_norm_before", "layer_norm_elementwise_affine"}) {
    if (!json.Bool(key, true)) json.Fail(key, "true");
  }
  if (json.Bool("_remove_final_layer_norm", false)) json.Fail("_remove_final_layer_norm", "false");
  if (json.Int("word_embed_proj_dim", 1, int64_t{1} << 24, config.hidden) != config.hidden) {
    json.Fail("word_embed_proj_dim", "hidden_size");
  }
  config.max_position = ReadMaxPosition(json);
  config.position_offset = 2;
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = 1e-5;
  config.qkv_bias = config.o_bias = config.mlp.bias = json.Bool("enable_bias", true);
  TensorNames& names = config.names;
  names.decoders = {{"model.decoder."}, {"decoder."}};
  names.positions = "embed_positions";
  names.pre_attention_norm = "self_attn_layer_norm";
  names.pre_mlp_norm = names.final_norm = "final_layer_norm";
  names.attention_out = "out_proj";
  names.mlp = "";
  names.up = "fc1";
  names.down = "fc2";
}

constexpr std::string_view kOptDefaults = R"({"vocab_size": 50272, "hidden_size": 768, "intermediate_size": 3072,
  "num_hidden_layers": 12, "num_attention_heads": 12, "activation_function": "relu",
  "max_position_embeddings": 2048, "tie_word_embeddings": true, "eos_token_id": 2, "bos_token_id": 2})";

}  // namespace

extern const Architecture kOpt = {.name = "OPTForCausalLM",
                                  .model_type = "opt",
                                  .read_config = ReadOpt,
                                  .defaults = kOptDefaults,
                                  .activation_key = "activation_function",
                                  .reads_rope = true,
                                  .ungated_mlp = true,
                                  .rename_keys = RenameOptKeys};

}  // namespace kvanta::models
