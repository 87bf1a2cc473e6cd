// AFMoE (Trinity): windows with rope in three of four layers, full attention without rope in the others, each with
// gates of its output; norms around both blocks; experts by sigmoid scores, with shared ones, after the first dense
// layers. transformers: models/afmoe/modeling_afmoe.py.
#include <cmath>

#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Keys of the published files that transformers does not read: what its class computes.
void CheckAfmoeKeys(const JsonObject& json) {
  if (json.String("score_func", "sigmoid") != "sigmoid") json.Fail("score_func", "sigmoid");
  if (!json.Bool("route_norm", true)) json.Fail("route_norm", "true");
  for (const char* key : {"n_group", "topk_group", "num_expert_groups", "num_limited_groups"}) {
    if (json.Int(key, 1, kMaxExperts, 1) != 1) json.Fail(key, "1");
  }
}

void ReadAfmoeExperts(const JsonObject& json, ModelConfig& config) {
  CheckAfmoeKeys(json);
  kernels::MoeConfig& moe = config.moe;
  ReadExpertCounts(json, "num_experts", "moe_intermediate_size", config);
  MarkSparseLayers(json.Int("num_dense_layers", 0, int64_t{1} << 20, 1), config);
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("num_shared_experts", 0, kMaxExperts)) * moe.moe_intermediate_size;
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = true;
  moe.norm_topk_prob = true;
  moe.routed_scaling_factor = static_cast<float>(json.Number("route_scale", 0, 1e6, 1.0));
  config.names.router = "router.gate";
  config.names.correction_bias = "expert_bias";
}

void ReadAfmoe(const JsonObject& json, ModelConfig& config) {
  if (json.Bool("attention_bias", false)) json.Fail("attention_bias", "false");  // the gates would have none
  config.qk_norm = QkNorm::kPerHead;
  config.attn_output_gate = OutputGate::kOwnMatrix;
  if (json.Bool("mup_enabled", false)) config.embedding_scale = std::sqrt(static_cast<double>(config.hidden));
  ReadAlternatingWindows(json, static_cast<int>(json.Int("global_attn_every_n_layers", 1, 4096, 4)), config);
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.visibility.IsFull()) layer.rope = RopeSpec{};
  }
  ReadAfmoeExperts(json, config);
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.pre_mlp_norm = "pre_mlp_layernorm";
  config.names.post_mlp_norm = "post_mlp_layernorm";
}

constexpr std::string_view kAfmoeDefaults = R"({"vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144,
  "moe_intermediate_size": 1408, "num_hidden_layers": 32, "num_attention_heads": 16, "head_dim": 128,
  "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 6,
  "num_shared_experts": 2, "sliding_window": 1024})";

}  // namespace

extern const Architecture kAfmoe = {"AfmoeForCausalLM", "afmoe", ReadAfmoe, kAfmoeDefaults};

}  // namespace kvanta::models
