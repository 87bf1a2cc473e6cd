// Arcee's AFM: Llama with an MLP without a gate, of squared ReLU. Nemotron and Minitron: the same MLP, LayerNorm whose
// weights are around zero, heads rotated in part. transformers: models/arcee/modeling_arcee.py,
// models/nemotron/modeling_nemotron.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadArcee(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
}

void ReadNemotron(const JsonObject& json, ModelConfig& config) {
  ReadArcee(json, config);
  config.norm = NormKind::kLayerWithBias;
  config.norm_weight_offset = 1;
  config.rms_eps = json.Number("norm_eps", 0, 1);
}

constexpr std::string_view kArceeDefaults = R"({"vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432,
  "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
  "eos_token_id": 128001, "bos_token_id": 128000})";
constexpr std::string_view kNemotronDefaults = R"({"vocab_size": 256000, "hidden_size": 6144,
  "intermediate_size": 24576, "num_hidden_layers": 32, "num_attention_heads": 48, "hidden_act": "relu2", "norm_eps": 1e-5,
  "partial_rotary_factor": 0.5, "max_position_embeddings": 4096, "eos_token_id": 3, "bos_token_id": 2})";

}  // namespace

extern const Architecture kArcee = {.name = "ArceeForCausalLM",
                                    .model_type = "arcee",
                                    .read_config = ReadArcee,
                                    .defaults = kArceeDefaults,
                                    .ungated_mlp = true};
extern const Architecture kNemotron = {.name = "NemotronForCausalLM",
                                       .model_type = "nemotron",
                                       .read_config = ReadNemotron,
                                       .defaults = kNemotronDefaults,
                                       .partial_rotary = true,
                                       .ungated_mlp = true};

}  // namespace kvanta::models
