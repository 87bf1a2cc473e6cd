// StableLM: Llama with LayerNorm, heads rotated in part, and attention and MLP that may be side by side.
// transformers: models/stablelm/modeling_stablelm.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadStableLm(const JsonObject& json, ModelConfig& config) {
  config.norm = NormKind::kLayerWithBias;
  config.rms_eps = json.Number("layer_norm_eps", 0, 1);
  config.qkv_bias = json.Bool("use_qkv_bias", false);
  if (json.Bool("qk_layernorm", false)) json.Fail("qk_layernorm", "false");
  config.parallel_blocks = json.Bool("use_parallel_residual", false);
  if (config.parallel_blocks) config.names.pre_mlp_norm = "";
}

constexpr std::string_view kStableLmDefaults = R"({"vocab_size": 50304, "hidden_size": 2560,
  "intermediate_size": 6912, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
  "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096, "eos_token_id": 0,
  "bos_token_id": 0})";

}  // namespace

extern const Architecture kStableLm = {.name = "StableLmForCausalLM",
                                       .model_type = "stablelm",
                                       .read_config = ReadStableLm,
                                       .defaults = kStableLmDefaults,
                                       .partial_rotary = true};

}  // namespace kvanta::models
