// GPT-OSS: attention sinks, windows in every other layer, experts with biases and a clamped SwiGLU.
// transformers: models/gpt_oss/modeling_gpt_oss.py.
#include <fmt/format.h>

#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Windows in the even layers where `layer_types` is absent.
void ReadGptOssWindows(const JsonObject& json, ModelConfig& config) {
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27));
  if (ReadLayerTypes(json, window, config)) return;
  for (int layer = 0; layer < config.layers; layer += 2) {
    config.layer_specs[layer].visibility = cache::SlidingWindow(window);
  }
}

void CheckActivation(const JsonObject& json, std::string_view key, float value) {
  constexpr double kRounding = 1e-6;  // rounding of the constant to f32
  const double given = json.Number(key, 0, 1e6, value);
  if (given < value - kRounding || given > value + kRounding) json.Fail(key, fmt::format("{}", value));
}

void ReadGptOss(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", true);
  ReadGptOssWindows(json, config);
  for (LayerSpec& layer : config.layer_specs) layer.moe = layer.attention_sinks = true;
  ReadExpertCounts(json, "num_local_experts", "intermediate_size", config);
  CheckActivation(json, "swiglu_alpha", kernels::kSwigluOaiAlpha);
  CheckActivation(json, "swiglu_limit", kernels::kSwigluOaiLimit);
  config.moe.activation = kernels::Activation::kSwigluOai;
  config.moe.norm_topk_prob = true;  // a softmax over the chosen logits
  config.moe.bias = true;
  if (json.Has("quantization_config")) {
    config.mxfp4_experts = json.Object("quantization_config").String("quant_method", "") == "mxfp4";
  }
  config.names.router = "router";
  config.names.interleaved_gate_up = true;
}

constexpr std::string_view kGptOssDefaults = R"({"head_dim": 64, "num_key_value_heads": 8, "num_local_experts": 128,
  "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072})";

constexpr std::string_view kGptOssRope = R"({"rope_type": "yarn", "factor": 32, "beta_fast": 32, "beta_slow": 1,
  "truncate": false, "original_max_position_embeddings": 4096})";

}  // namespace

extern const Architecture kGptOss = {.name = "GptOssForCausalLM",
                                     .model_type = "gpt_oss",
                                     .read_config = ReadGptOss,
                                     .defaults = kGptOssDefaults,
                                     .rope_theta = 150000,
                                     .default_rope = kGptOssRope};

}  // namespace kvanta::models
