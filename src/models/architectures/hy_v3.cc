// Hunyuan 3: Qwen3's attention; experts by sigmoid scores, with shared ones, after the first layer. transformers:
// models/hy_v3/modeling_hy_v3.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Keys of Tencent's own code that transformers does not read: what its class computes.
void CheckHyV3Keys(const JsonObject& json, const ModelConfig& config) {
  for (const char* key :
       {"qk_norm", "use_qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"}) {
    if (!json.Bool(key, true)) json.Fail(key, "true");
  }
  const int width = config.moe.moe_intermediate_size;
  if (json.Int("expert_hidden_dim", 1, kMaxExpertWidth, width) != width) {
    json.Fail("expert_hidden_dim", "moe_intermediate_size");
  }
}

void ReadHyV3(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.mlp.bias = json.Bool("mlp_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  ReadMlpLayerTypes(json, json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 1), config);
  ReadExpertCounts(json, json.Has("num_local_experts") ? "num_local_experts" : "num_experts", "moe_intermediate_size",
                   config);
  CheckHyV3Keys(json, config);
  kernels::MoeConfig& moe = config.moe;
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("num_shared_experts", 1, kMaxExperts)) * moe.moe_intermediate_size;
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.has_correction_bias = true;
  moe.norm_topk_prob = true;
  moe.routed_scaling_factor = static_cast<float>(json.Number("router_scaling_factor", 0, 1e6));
  config.names.router = "router.gate";
  config.names.correction_bias = "expert_bias";
  config.names.shared_expert = "shared_mlp";
}

constexpr std::string_view kHyV3Defaults = R"({"vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312,
  "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts": 192, "num_experts_per_tok": 8,
  "num_shared_experts": 1, "moe_intermediate_size": 1536, "router_scaling_factor": 2.826})";

}  // namespace

extern const Architecture kHyV3 = {.name = "HYV3ForCausalLM",
                                   .model_type = "hy_v3",
                                   .read_config = ReadHyV3,
                                   .defaults = kHyV3Defaults,
                                   .rope_theta = 11158840.0};

}  // namespace kvanta::models
