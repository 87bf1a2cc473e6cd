// ERNIE 4.5 with experts: heads rotated in pairs of neighbours; experts with shared ones, chosen by softmax scores and
// a correction bias. transformers: models/ernie4_5_moe/modeling_ernie4_5_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Every moe_layer_interval-th layer of those from moe_layer_start_index to moe_layer_end_index; -1: the last one.
void ReadMoeLayers(const JsonObject& json, ModelConfig& config) {
  constexpr int64_t kMax = int64_t{1} << 20;
  const int64_t interval = json.Int("moe_layer_interval", 1, kMax, 1);
  const int64_t first = json.Int("moe_layer_start_index", 0, kMax, 1);
  const int64_t end = json.Int("moe_layer_end_index", -1, kMax, -1);
  for (int64_t layer = first; layer < config.layers && (end == -1 || layer <= end); ++layer) {
    config.layer_specs[static_cast<size_t>(layer)].moe = (layer + 1) % interval == 0;
  }
}

void ReadErnie45Moe(const JsonObject& json, ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  if (json.Bool("use_bias", false)) json.Fail("use_bias", "false");  // bias of all projections and the output matrix
  for (LayerSpec& layer : config.layer_specs) layer.rope.interleaved = true;
  ReadMoeLayers(json, config);
  moe.num_experts = static_cast<int>(json.Int("moe_num_experts", 1, kMaxExperts));
  moe.num_experts_per_tok = static_cast<int>(json.Int("moe_k", 1, moe.num_experts));
  moe.moe_intermediate_size = static_cast<int>(json.Int("moe_intermediate_size", 1, kMaxExpertWidth));
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("moe_num_shared_experts", 0, kMaxExperts)) * moe.moe_intermediate_size;
  moe.has_correction_bias = true;
  moe.norm_topk_prob = true;
  // The least divisor of the weights: so small a one is never used.
  if (json.Number("moe_norm_min", 0, 1) > 1e-12) json.Fail("moe_norm_min", "at most 1e-12");
  config.names.correction_bias = "moe_statics.e_score_correction_bias";
  config.names.correction_bias_is_row = true;
}

constexpr std::string_view kErnie45MoeDefaults = R"({"num_key_value_heads": 4, "moe_intermediate_size": 1536,
  "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_norm_min": 1e-12, "rms_norm_eps": 1e-5,
  "max_position_embeddings": 131072, "tie_word_embeddings": true})";

}  // namespace

extern const Architecture kErnie45Moe = {.name = "Ernie4_5_MoeForCausalLM",
                                         .model_type = "ernie4_5_moe",
                                         .read_config = ReadErnie45Moe,
                                         .defaults = kErnie45MoeDefaults,
                                         .rope_theta = 5e5};

}  // namespace kvanta::models
