// Apertus: Llama with norms of q and k, and an MLP of xIELU without a gate. transformers:
// models/apertus/modeling_apertus.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadApertus(const JsonObject& json, ModelConfig& config) {
  config.qk_norm = QkNorm::kPerHead;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.names.pre_attention_norm = "attention_layernorm";
  config.names.pre_mlp_norm = "feedforward_layernorm";
}

constexpr std::string_view kApertusDefaults = R"({"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336,
  "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "xielu", "max_position_embeddings": 65536,
  "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1})";
constexpr std::string_view kApertusRope = R"({"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0,
  "original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0})";

}  // namespace

extern const Architecture kApertus = {.name = "ApertusForCausalLM",
                                      .model_type = "apertus",
                                      .read_config = ReadApertus,
                                      .defaults = kApertusDefaults,
                                      .rope_theta = 12e6,
                                      .default_rope = kApertusRope,
                                      .ungated_mlp = true};

}  // namespace kvanta::models
