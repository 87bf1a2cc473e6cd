#include "models/config/moe_config.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvanta::models {

void ReadExpertCounts(const JsonObject& json, std::string_view experts_key, std::string_view width_key,
                      ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  moe.num_experts = static_cast<int>(json.Int(experts_key, 1, kMaxExperts));
  moe.num_experts_per_tok = static_cast<int>(json.Int("num_experts_per_tok", 1, moe.num_experts));
  moe.moe_intermediate_size = static_cast<int>(json.Int(width_key, 1, kMaxExpertWidth));
}

void ReadExpertGroups(const JsonObject& json, std::string_view experts_key, ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  moe.n_group = static_cast<int>(json.Int("n_group", 1, moe.num_experts, 1));
  moe.topk_group = static_cast<int>(json.Int("topk_group", 1, moe.n_group, moe.n_group));
  if (moe.num_experts % moe.n_group != 0) {
    json.Fail("n_group", fmt::format("a divisor of {} ({})", experts_key, moe.num_experts));
  }
  if (moe.num_experts_per_tok > moe.num_experts / moe.n_group * moe.topk_group) {
    json.Fail("topk_group",
              fmt::format("groups with at least num_experts_per_tok ({}) experts", moe.num_experts_per_tok));
  }
}

void ReadSigmoidExperts(const JsonObject& json, std::string_view experts_key, std::string_view shared_key,
                        ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  // dots.llm1 has the name of the method in the place of that of the function.
  const std::string function = json.String("scoring_func", "sigmoid");
  if (function != "sigmoid" && function != "noaux_tc") json.Fail("scoring_func", "sigmoid");
  if (json.String("topk_method", "noaux_tc") != "noaux_tc") json.Fail("topk_method", "noaux_tc");
  ReadExpertCounts(json, experts_key, "moe_intermediate_size", config);
  ReadExpertGroups(json, experts_key, config);
  if (moe.num_experts / moe.n_group < 2) json.Fail("n_group", "groups of at least 2 experts");
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int(shared_key, 0, kMaxExperts, 0)) * moe.moe_intermediate_size;
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = true;
  moe.norm_topk_prob = json.BoolOrNull("norm_topk_prob", true);
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6, 1.0));
}

void MarkSparseLayers(int64_t first, ModelConfig& config) {
  for (int64_t layer = first; layer < config.layers; ++layer) {
    config.layer_specs[static_cast<size_t>(layer)].moe = true;
  }
}

void ReadMlpLayerTypes(const JsonObject& json, int64_t first, ModelConfig& config) {
  constexpr const char* kKey = "mlp_layer_types";
  if (!json.Has(kKey)) return MarkSparseLayers(first, config);
  const Json& types = json.Get(kKey);
  const auto is_type = [](const Json& type) { return type == "sparse" || type == "dense"; };
  if (!types.is_array() || types.size() != config.layer_specs.size() || !std::ranges::all_of(types, is_type)) {
    json.Fail(kKey, fmt::format("'sparse' or 'dense' for each of {} layers", config.layers));
  }
  for (size_t layer = 0; layer < types.size(); ++layer) config.layer_specs[layer].moe = types[layer] == "sparse";
}

void ReadSparseLayers(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kDense = "mlp_only_layers";
  const int64_t step = json.Int("decoder_sparse_step", 1, int64_t{1} << 20, 1);
  for (int layer = 0; layer < config.layers; ++layer) config.layer_specs[layer].moe = (layer + 1) % step == 0;
  if (!json.Has(kDense)) return;
  const Json& dense = json.Get(kDense);
  const auto is_layer = [&](const Json& layer) {
    return layer.is_number_unsigned() && layer.get<uint64_t>() < config.layer_specs.size();
  };
  if (!dense.is_array() || !std::ranges::all_of(dense, is_layer)) {
    json.Fail(kDense, fmt::format("a list of layers from 0 to {}", config.layers - 1));
  }
  for (const Json& layer : dense) config.layer_specs[layer.get<size_t>()].moe = false;
}

}  // namespace kvanta::models
