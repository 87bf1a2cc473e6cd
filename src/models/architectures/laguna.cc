// Laguna: query heads, windows and ropes by layer, heads rotated in part, a softplus gate of each head's output or of
// each channel's; experts by sigmoid scores, with a shared one, after the first layer. transformers:
// models/laguna/modeling_laguna.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

void ReadLagunaHeads(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kHeads = "num_attention_heads_per_layer";
  if (!json.Has(kHeads)) return;
  const Json& heads = json.Get(kHeads);
  const auto fits = [&](const Json& count) {
    return count.is_number_unsigned() && count.get<uint64_t>() >= 1 && count.get<uint64_t>() <= 65536 &&
           count.get<int>() % config.kv_heads == 0;
  };
  if (!heads.is_array() || heads.size() != config.layer_specs.size() || !std::ranges::all_of(heads, fits)) {
    json.Fail(kHeads, fmt::format("a multiple of num_key_value_heads ({}) for each of {} layers", config.kv_heads,
                                  config.layers));
  }
  for (size_t layer = 0; layer < heads.size(); ++layer) config.layer_specs[layer].heads = heads[layer].get<int>();
}

void ReadLagunaGates(const JsonObject& json, ModelConfig& config) {
  const Json* gating = json.Find("gating");
  const bool by_channel = gating != nullptr && *gating == "per-element";
  if (gating != nullptr && !by_channel && *gating != true && *gating != "per-head") {
    json.Fail("gating", "true, per-head or per-element");
  }
  config.attn_output_gate = by_channel ? OutputGate::kOwnMatrix : OutputGate::kPerHead;
  config.attn_gate_function = kernels::GateFunction::kSoftplus;
  config.names.output_gate = "g_proj";
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  if (by_channel && config.qkv_bias) json.Fail("attention_bias", "false, where gating is per-element");
}

void ReadLaguna(const JsonObject& json, ModelConfig& config) {
  if (json.Bool("moe_apply_router_weight_on_input", false)) json.Fail("moe_apply_router_weight_on_input", "false");
  ReadLayerTypes(json, static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0)), config);
  ReadLagunaHeads(json, config);
  ReadRopesByLayerType(json, {.theta = 5e5, .partial = 0.5}, {}, config);
  ReadLagunaGates(json, config);
  config.qk_norm = QkNorm::kPerHead;
  ReadMlpLayerTypes(json, 1, config);
  ReadExpertCounts(json, "num_experts", "moe_intermediate_size", config);
  kernels::MoeConfig& moe = config.moe;
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("shared_expert_intermediate_size", 1, kMaxExpertWidth));
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = true;
  moe.norm_topk_prob = true;
  moe.routed_scaling_factor = static_cast<float>(json.Number("moe_routed_scaling_factor", 0, 1e6, 1));
  config.router_logit_softcapping = json.Number("moe_router_logit_softcapping", 0, 1e6, 0);
  config.names.correction_bias = "experts.e_score_correction_bias";
  config.names.shared_expert = "shared_expert";
}

constexpr std::string_view kLagunaDefaults = R"({"vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
  "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
  "max_position_embeddings": 131072, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
  "shared_expert_intermediate_size": 512, "sliding_window": 512})";

}  // namespace

extern const Architecture kLaguna = {.name = "LagunaForCausalLM",
                                     .model_type = "laguna",
                                     .read_config = ReadLaguna,
                                     .defaults = kLagunaDefaults,
                                     .reads_rope = true};

}  // namespace kvanta::models
