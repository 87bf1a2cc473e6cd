// Falcon-H1: attention and Mamba-2 side by side in every layer, and factors of what goes in and out of each block.
// transformers: models/falcon_h1/modeling_falcon_h1.py.
#include <fmt/format.h>

#include <vector>

#include "models/architecture.h"
#include "models/config/mamba2_config.h"

namespace kvanta::models {
namespace {

double ReadFactor(const JsonObject& json, const char* key) {
  return json.Number(key, 1e-9, 1e9, 1);
}

std::vector<double> ReadFactors(const JsonObject& json, const char* key, size_t count) {
  if (!json.Has(key)) return std::vector<double>(count, 1);
  const Json& factors = json.Get(key);
  std::vector<double> values;
  for (const Json& factor : factors) {
    if (factor.is_number()) values.push_back(factor.get<double>());
  }
  if (!factors.is_array() || factors.size() != count || values.size() != count) {
    json.Fail(key, fmt::format("a list of {} numbers", count));
  }
  return values;
}

void ReadMamba2Factors(const JsonObject& json, Mamba2Config& mamba2) {
  const double in = ReadFactor(json, "ssm_in_multiplier");
  if (in != 1 && mamba2.in_bias) json.Fail("ssm_in_multiplier", "1 with mamba_proj_bias");
  const std::vector<double> factors = ReadFactors(json, "ssm_multipliers", 5);
  const auto factor = [&](size_t part) { return static_cast<float>(in * factors[part]); };
  mamba2.z_scale = factor(0);
  mamba2.x_scale = factor(1);
  mamba2.b_scale = factor(2);
  mamba2.c_scale = factor(3);
  mamba2.dt_scale = factor(4);
}

// Two layers here for each of the checkpoint: Mamba-2, and with the same input attention, with the MLP after both.
void DivideLayers(double mamba2_scale, double attention_scale, double mlp_scale, ModelConfig& config) {
  std::vector<LayerSpec> specs;
  for (int layer = 0; layer < config.layers; ++layer) {
    LayerSpec mamba2 = config.layer_specs[layer], attention = mamba2;
    mamba2.MakeRecurrent(RecurrentKind::kMamba2);
    mamba2.has_mlp = false;
    mamba2.stored_attention = mamba2.stored_mlp = layer;
    mamba2.attention_scale = mamba2_scale;
    attention.shares_input = true;
    attention.stored_attention = attention.stored_mlp = layer;
    attention.attention_scale = attention_scale;
    attention.mlp_scale = mlp_scale;
    specs.insert(specs.end(), {mamba2, attention});
  }
  config.stored_layers = config.layers;
  config.layers *= 2;
  config.layer_specs = std::move(specs);
}

void ReadFalconH1(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  config.names.pre_mlp_norm = "pre_ff_layernorm";
  config.names.mlp = "feed_forward";
  config.names.final_norm = "final_layernorm";
  const int64_t expanded = json.Int("mamba_expand", 1, 64, 2) * config.hidden;
  const int64_t width = json.Int("mamba_d_ssm", 1, int64_t{1} << 24, expanded);
  ReadMamba2(json, {}, width, config);
  Mamba2Config& mamba2 = config.mamba2;
  mamba2.out_bias = json.Bool("projectors_bias", false);
  using kernels::Mamba2Gate;
  if (!json.Bool("mamba_rms_norm", false)) {
    mamba2.shape.gate = Mamba2Gate::kNoNorm;
  } else if (json.Bool("mamba_norm_before_gate", true)) {
    mamba2.shape.gate = Mamba2Gate::kNormBeforeGate;
  }
  ReadMamba2Factors(json, mamba2);
  config.embedding_scale = ReadFactor(json, "embedding_multiplier");
  config.logits_divisor = 1 / ReadFactor(json, "lm_head_multiplier");
  // A factor of the attention's input is one of its queries, keys and values.
  const double in = ReadFactor(json, "attention_in_multiplier");
  if (in != 1 && config.qkv_bias) json.Fail("attention_in_multiplier", "1 with attention_bias");
  config.softmax_scale *= in * in * ReadFactor(json, "key_multiplier");
  const std::vector<double> mlp = ReadFactors(json, "mlp_multipliers", 2);
  config.mlp.gate_scale = static_cast<float>(mlp[0]);
  DivideLayers(ReadFactor(json, "ssm_out_multiplier"), in * ReadFactor(json, "attention_out_multiplier"), mlp[1],
               config);
}

constexpr std::string_view kFalconH1Defaults = R"({"vocab_size": 128000, "hidden_size": 4096,
  "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_n_heads": 128,
  "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kFalconH1 = {"FalconH1ForCausalLM", "falcon_h1", ReadFalconH1, kFalconH1Defaults};

}  // namespace kvanta::models
