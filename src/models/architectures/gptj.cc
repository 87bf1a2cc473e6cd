// GPT-J: attention and MLP side by side after one LayerNorm, heads rotated in part, in pairs of neighbours, an MLP of
// GELU without a gate; a bias of the output matrix. transformers: models/gptj/modeling_gptj.py.
#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

void ReadGptJ(const JsonObject& json, ModelConfig& config) {
  const auto rotary_dim = static_cast<int>(json.Int("rotary_dim", 2, config.head_dim));
  if (rotary_dim % 2 != 0) json.Fail("rotary_dim", "an even number");
  if (config.tied_embeddings) json.Fail("tie_word_embeddings", "false: the output matrix has a bias");
  SetRope({.rotary_dim = rotary_dim, .interleaved = true, .original_max_position = ReadMaxPosition(json)},
          ReadMaxPosition(json), config);
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_epsilon", 0, 1);
  config.parallel_blocks = true;
  config.mlp.bias = config.lm_head_bias = true;
  TensorNames& names = config.names;
  names.decoders = {{"transformer.", "lm_head", "wte", "h"}, {"", "lm_head", "wte", "h"}};
  names.pre_attention_norm = "ln_1";
  names.pre_mlp_norm = "";
  names.final_norm = "ln_f";
  names.attention = "attn";
  names.attention_out = "out_proj";
  names.up = "fc_in";
  names.down = "fc_out";
}

constexpr std::string_view kGptJDefaults = R"({"vocab_size": 50400, "hidden_size": 4096, "intermediate_size": 16384,
  "num_hidden_layers": 28, "num_attention_heads": 16, "activation_function": "gelu_new", "rotary_dim": 64,
  "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "eos_token_id": 50256, "bos_token_id": 50256})";

}  // namespace

extern const Architecture kGptJ = {.name = "GPTJForCausalLM",
                                   .model_type = "gptj",
                                   .read_config = ReadGptJ,
                                   .defaults = kGptJDefaults,
                                   .activation_key = "activation_function",
                                   .reads_rope = true,
                                   .ungated_mlp = true,
                                   .rename_keys = RenameGpt2Keys};

}  // namespace kvanta::models
