// Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side after one LayerNorm, an MLP of GELU without a gate, heads
// rotated in part, biases everywhere, of the output matrix too. transformers: models/phi/modeling_phi.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadPhi(const JsonObject& json, ModelConfig& config) {
  if (json.Bool("qk_layernorm", false)) json.Fail("qk_layernorm", "false");
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_eps", 0, 1);
  config.parallel_blocks = true;
  config.qkv_bias = config.o_bias = config.mlp.bias = config.lm_head_bias = true;
  config.names.pre_mlp_norm = "";
  config.names.final_norm = "final_layernorm";
  config.names.attention_out = "dense";
  config.names.up = "fc1";
  config.names.down = "fc2";
}

constexpr std::string_view kPhiDefaults = R"({"vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192,
  "num_hidden_layers": 24, "num_attention_heads": 32, "hidden_act": "gelu_new", "max_position_embeddings": 2048,
  "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kPhi = {.name = "PhiForCausalLM",
                                  .model_type = "phi",
                                  .read_config = ReadPhi,
                                  .defaults = kPhiDefaults,
                                  .partial_rotary = true,
                                  .ungated_mlp = true};

}  // namespace kvanta::models
