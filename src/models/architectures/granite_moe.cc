// Granite 3 with experts: Granite's factors, experts in all layers, a shared expert in addition in the class
// GraniteMoeShared. transformers: models/granitemoe/modeling_granitemoe.py,
// models/granitemoeshared/modeling_granitemoeshared.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadGraniteMoe(const JsonObject& json, ModelConfig& config) {
  ReadGraniteFactors(json, config);
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  ReadGraniteExperts(json, config);
}

constexpr std::string_view kGraniteMoeDefaults = R"({"num_local_experts": 8, "num_experts_per_tok": 2,
  "intermediate_size": 11008, "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

void ReadGraniteMoeShared(const JsonObject& json, ModelConfig& config) {
  ReadGraniteMoe(json, config);
  config.moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("shared_intermediate_size", 0, kMaxExpertWidth, 0));
  config.mlp.kind = MlpKind::kFusedGate;
  TensorNames& names = config.names;
  names.shared_expert = "shared_mlp";
  names.shared_expert_in_layer = true;
  names.gate_up = "input_linear";
  names.down = "output_linear";
}

void ReadGraniteExperts(const JsonObject& json, ModelConfig& config) {
  MarkSparseLayers(0, config);
  ReadExpertCounts(json, "num_local_experts", "intermediate_size", config);
  config.moe.norm_topk_prob = true;  // a softmax over the chosen logits
  TensorNames& names = config.names;
  names.mlp = "block_sparse_moe";
  names.router = "router.layer";
  names.fused_gate_up = "input_linear.weight";
  names.fused_down = "output_linear.weight";
  names.expert_order = ExpertOrder::kOutIn;
}

extern const Architecture kGraniteMoe = {"GraniteMoeForCausalLM", "granitemoe", ReadGraniteMoe, kGraniteMoeDefaults};
extern const Architecture kGraniteMoeShared = {"GraniteMoeSharedForCausalLM", "granitemoeshared", ReadGraniteMoeShared,
                                               kGraniteMoeDefaults};

}  // namespace kvanta::models
