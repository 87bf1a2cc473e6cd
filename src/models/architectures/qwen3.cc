// Qwen3: RMS norms on every head of q and k before RoPE. transformers: models/qwen3/modeling_qwen3.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadQwen3(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  ReadQwenWindows(json, config);
}

}  // namespace

extern const Architecture kQwen3 = {.name = "Qwen3ForCausalLM",
                                    .model_type = "qwen3",
                                    .read_config = ReadQwen3,
                                    .defaults = R"({"head_dim": 128, "num_key_value_heads": 32,
  "max_window_layers": 28, "max_position_embeddings": 32768})",
                                    .text_defaults = kQwenTextDefaults};

}  // namespace kvanta::models
