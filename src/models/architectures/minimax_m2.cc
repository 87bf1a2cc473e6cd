// MiniMax-M2: experts by sigmoid scores in all layers, partly rotated heads, norms of q and k over all heads together.
// transformers: models/minimax_m2/modeling_minimax_m2.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Published files have rotary_dim in place of partial_rotary_factor, which comes first where both are.
void ReadRotaryDim(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "rotary_dim";
  constexpr const char* kFactor = "partial_rotary_factor";
  if (!json.Has(kKey)) return;
  const auto rotary_dim = static_cast<int>(json.Int(kKey, 2, config.head_dim));
  if (rotary_dim % 2 != 0) json.Fail(kKey, "an even number");
  const auto has_factor = [&](const char* key) { return json.Has(key) && json.Object(key).Has(kFactor); };
  if (json.Has(kFactor) || has_factor("rope_parameters") || has_factor("rope_scaling")) {
    const int given = config.layer_specs.front().rope.rotary_dim;
    if (given != rotary_dim) json.Fail(kKey, fmt::format("{}, as {} says", given, kFactor));
  }
  for (LayerSpec& layer : config.layer_specs) layer.rope.rotary_dim = rotary_dim;
}

// Keys of MiniMax's own code that transformers does not read: the values of the published models.
void CheckPublishedKeys(const JsonObject& json) {
  constexpr const char* kNorm = "qk_norm_type";
  constexpr const char* kTypes = "attn_type_list";
  if (!json.Bool("use_qk_norm", true)) json.Fail("use_qk_norm", "true");
  if (json.String(kNorm, "per_layer") != "per_layer") json.Fail(kNorm, "per_layer");
  if (!json.Bool("use_routing_bias", true)) json.Fail("use_routing_bias", "true");
  if (json.String("scoring_func", "sigmoid") != "sigmoid") json.Fail("scoring_func", "sigmoid");
  if (json.Int("shared_intermediate_size", 0, kMaxExpertWidth, 0) != 0) json.Fail("shared_intermediate_size", "0");
  const Json types = json.Has(kTypes) ? json.Get(kTypes) : Json::array();
  if (!types.is_array() || !std::ranges::all_of(types, [](const Json& type) { return type == 1; })) {
    json.Fail(kTypes, "1, attention with a softmax, for each layer");
  }
}

void ReadMinimaxM2(const JsonObject& json, ModelConfig& config) {
  CheckPublishedKeys(json);
  ReadRotaryDim(json, config);
  config.qk_norm = QkNorm::kAllHeads;
  MarkSparseLayers(0, config);
  ReadExpertCounts(json, "num_local_experts", "intermediate_size", config);
  config.moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  config.moe.has_correction_bias = true;
  config.moe.norm_topk_prob = true;
  config.names.mlp = "block_sparse_moe";
  config.names.correction_bias = "e_score_correction_bias";
}

constexpr std::string_view kMinimaxM2Defaults = R"({"num_key_value_heads": 8, "head_dim": 128,
  "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608})";

}  // namespace

extern const Architecture kMinimaxM2 = {.name = "MiniMaxM2ForCausalLM",
                                        .model_type = "minimax_m2",
                                        .read_config = ReadMinimaxM2,
                                        .defaults = kMinimaxM2Defaults,
                                        .rope_theta = 5e6,
                                        .partial_rotary = true};

}  // namespace kvanta::models
