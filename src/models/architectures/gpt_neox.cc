// GPT-NeoX and Pythia: attention and MLP side by side, each after a LayerNorm of its own, or one after the other; q, k
// and v of each head in one matrix; an MLP of GELU without a gate, heads rotated in part. transformers:
// models/gpt_neox/modeling_gpt_neox.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void RenameGptNeoxKeys(Json& keys) {
  RemoveHeadKeys(keys);
  RenameKey(keys, "rotary_pct", "partial_rotary_factor");
  RenameKey(keys, "rotary_emb_base", "rope_theta");
}

void ReadGptNeox(const JsonObject& json, ModelConfig& config) {
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_eps", 0, 1);
  config.parallel_blocks = json.Bool("use_parallel_residual", true);
  config.qkv_layout = QkvLayout::kByKvHead;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", true);
  config.mlp.bias = true;
  TensorNames& names = config.names;
  // The last one is that of GGUF files.
  names.decoders = {{"gpt_neox.", "embed_out", "embed_in"}, {"", "embed_out", "embed_in"}, {}};
  names.final_norm = "final_layer_norm";
  names.attention = "attention";
  names.qkv = "query_key_value";
  names.attention_out = "dense";
  names.up = "dense_h_to_4h";
  names.down = "dense_4h_to_h";
}

constexpr std::string_view kGptNeoxDefaults = R"({"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576,
  "num_hidden_layers": 44, "num_attention_heads": 64, "hidden_act": "gelu", "max_position_embeddings": 2048,
  "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "eos_token_id": 2, "bos_token_id": 0})";

}  // namespace

extern const Architecture kGptNeox = {.name = "GPTNeoXForCausalLM",
                                      .model_type = "gpt_neox",
                                      .read_config = ReadGptNeox,
                                      .defaults = kGptNeoxDefaults,
                                      .partial_rotary = true,
                                      .ungated_mlp = true,
                                      .rename_keys = RenameGptNeoxKeys};

}  // namespace kvanta::models
