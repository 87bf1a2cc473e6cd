// LFM2 and LFM2-MoE: gated short convolutions, and some layers of attention; dense MLPs, in LFM2-MoE in the first
// layers alone. transformers: models/lfm2/modeling_lfm2.py, models/lfm2_moe/modeling_lfm2_moe.py.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/math.h"
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Layers without attention by full_attn_idxs, which the first checkpoints have in place of layer_types; without
// either, all have it.
std::vector<bool> ConvLayers(const JsonObject& json, const ModelConfig& config) {
  constexpr const char* kKey = "full_attn_idxs";
  std::vector<bool> conv(config.layer_specs.size(), json.Has(kKey));
  if (!json.Has(kKey)) return conv;
  const Json& layers = json.Get(kKey);
  const auto is_layer = [&](const Json& layer) {
    return layer.is_number_unsigned() && layer.get<uint64_t>() < conv.size();
  };
  if (!layers.is_array() || !std::ranges::all_of(layers, is_layer)) {
    json.Fail(kKey, fmt::format("a list of layers from 0 to {}", config.layers - 1));
  }
  for (const Json& layer : layers) conv[layer.get<size_t>()] = false;
  return conv;
}

void ReadLfm2Layers(const JsonObject& json, const std::vector<bool>& conv, ModelConfig& config) {
  config.names.pre_attention_norm = "operator_norm";
  config.names.pre_mlp_norm = "ffn_norm";
  config.names.final_norm = "embedding_norm";
  config.names.q_norm = "q_layernorm";
  config.names.k_norm = "k_layernorm";
  config.names.attention_out = "out_proj";
  config.names.mlp = "feed_forward";
  config.names.gate = "w1";
  config.names.up = "w3";
  config.names.down = "w2";
  config.qk_norm = QkNorm::kPerHead;
  config.rms_eps = json.Number("norm_eps", 0, 1);
  config.tied_embeddings = json.Bool("tie_embedding", config.tied_embeddings);  // the first checkpoints' name
  config.short_conv.channels = config.hidden;
  config.short_conv.conv_width = static_cast<int>(json.Int("conv_L_cache", 2, kernels::kMaxConvWidth));
  config.short_conv_bias = json.Bool("conv_bias", false);
  ReadRecurrentLayers(json, {.kind = RecurrentKind::kShortConv, .name = "conv", .layers = conv}, config);
}

// The file has the width before it is multiplied by 2/3 and rounded up, unless it says otherwise.
int MlpWidth(const JsonObject& json) {
  constexpr const char* kKey = "block_ff_dim";  // the first checkpoints' name of intermediate_size
  constexpr int64_t kMax = int64_t{1} << 24;
  int64_t width = json.Int(json.Has(kKey) ? kKey : "intermediate_size", 1, kMax);
  if (json.Bool("block_auto_adjust_ff_dim", true)) {
    width = static_cast<int64_t>(2 * static_cast<double>(width) / 3);
    if (json.Has("block_ffn_dim_multiplier")) {
      const int64_t multiple = json.Int("block_multiple_of", 1, kMax);
      width = static_cast<int64_t>(json.Number("block_ffn_dim_multiplier", 0, 64) * static_cast<double>(width));
      width = CeilDiv(width, multiple) * multiple;
    }
    if (width < 1 || width > kMax) {
      json.Fail("block_ffn_dim_multiplier", fmt::format("a factor that makes MLPs of 1 to {} channels", kMax));
    }
  }
  return static_cast<int>(width);
}

void ReadLfm2(const JsonObject& json, ModelConfig& config) {
  ReadLfm2Layers(json, ConvLayers(json, config), config);
  config.intermediate_size = MlpWidth(json);
}

void ReadLfm2Moe(const JsonObject& json, ModelConfig& config) {
  if (!json.Has("layer_types")) json.Fail("layer_types", "'full_attention' or 'conv' for each layer");
  ReadLfm2Layers(json, std::vector<bool>(config.layer_specs.size()), config);
  ReadExpertCounts(json, "num_experts", "moe_intermediate_size", config);
  kernels::MoeConfig& moe = config.moe;
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = json.Bool("use_expert_bias", true);
  moe.norm_topk_prob = json.Bool("norm_topk_prob", true);
  moe.norm_topk_eps = 1e-6F;
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6));
  config.names.correction_bias = "expert_bias";
  config.names.expert_order = ExpertOrder::kOutIn;
  MarkSparseLayers(json.Int("num_dense_layers", 0, config.layers), config);
}

constexpr std::string_view kLfm2Defaults = R"({"vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
  "norm_eps": 1e-5, "tie_word_embeddings": true, "conv_L_cache": 3, "block_multiple_of": 256,
  "block_ffn_dim_multiplier": 1.0})";

constexpr std::string_view kLfm2MoeDefaults = R"({"vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
  "moe_intermediate_size": 1792, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
  "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": true, "conv_L_cache": 3,
  "num_dense_layers": 2, "num_experts_per_tok": 4, "num_experts": 32, "routed_scaling_factor": 1.0})";

}  // namespace

extern const Architecture kLfm2 = {.name = "Lfm2ForCausalLM",
                                   .model_type = "lfm2",
                                   .read_config = ReadLfm2,
                                   .defaults = kLfm2Defaults,
                                   .rope_theta = 1e6};
extern const Architecture kLfm2Moe = {.name = "Lfm2MoeForCausalLM",
                                      .model_type = "lfm2_moe",
                                      .read_config = ReadLfm2Moe,
                                      .defaults = kLfm2MoeDefaults,
                                      .rope_theta = 1e6};

}  // namespace kvanta::models
