// Command A with experts: Cohere 2's attention and blocks side by side; experts next to a shared one, after the first
// dense layers; LayerNorm or RMS norm. transformers: models/cohere2_moe/modeling_cohere2_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Windows in all layers but every sliding_window_pattern-th one, counted from the first sparse one, with a pattern of
// their own in the dense ones; rope in layers with a window, and in dense ones whose pattern is 1.
void ReadLayers(const JsonObject& json, ModelConfig& config) {
  constexpr int64_t kMax = int64_t{1} << 20;
  const int64_t dense = json.Int("first_k_dense_replace", 0, config.layers, 0);
  const int64_t pattern = json.Int("sliding_window_pattern", 1, kMax, 4);
  const int64_t of_dense = json.Int("prefix_dense_sliding_window_pattern", 1, kMax, 1);
  ReadMlpLayerTypes(json, dense, config);
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  if (!ReadLayerTypes(json, window, config)) {
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      const int64_t own = layer < dense ? of_dense : pattern, number = layer < dense ? layer : layer - dense;
      if ((number + 1) % own == 0) continue;
      if (window == 0) json.Fail("sliding_window", "a number of tokens");
      config.layer_specs[static_cast<size_t>(layer)].visibility = cache::SlidingWindow(window);
    }
  }
  constexpr const char* kDenseSize = "prefix_dense_intermediate_size";
  for (LayerSpec& layer : config.layer_specs) {
    const bool always_rotated = !layer.moe && of_dense == 1;
    if (layer.visibility.IsFull() && !always_rotated) layer.rope = {};
    if (!layer.moe)
      layer.intermediate_size = static_cast<int>(json.Int(kDenseSize, 1, kMaxExpertWidth, config.intermediate_size));
  }
}

void ReadCohere2Moe(const JsonObject& json, ModelConfig& config) {
  ReadCohereBlocks(json, config);
  if (json.Has("rms_norm_eps")) {
    config.norm = NormKind::kRms;
    config.rms_eps = json.Number("rms_norm_eps", 0, 1);
  }
  ReadLayers(json, config);
  kernels::MoeConfig& moe = config.moe;
  ReadExpertCounts(json, "num_experts", "intermediate_size", config);
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("num_shared_experts", 0, kMaxExperts, 0)) * moe.moe_intermediate_size;
  const std::string function = json.String("expert_selection_fn", "softmax");
  if (function != "softmax" && function != "sigmoid") json.Fail("expert_selection_fn", "softmax or sigmoid");
  // A softmax of the chosen logits is that of all, divided by the sum of the chosen ones.
  const bool is_softmax = function == "softmax";
  moe.scoring_func = is_softmax ? kernels::ScoringFunc::kSoftmax : kernels::ScoringFunc::kSigmoid;
  moe.norm_topk_prob = is_softmax || json.Bool("norm_topk_prob", true);
  const std::string strategy = json.String("shared_expert_combination_strategy", "average");
  if (strategy != "average" && strategy != "sum") json.Fail("shared_expert_combination_strategy", "average or sum");
  if (moe.shared_expert_intermediate_size != 0 && strategy == "average") {
    moe.routed_scaling_factor = config.shared_expert_scale = 0.5F;
  }
}

constexpr std::string_view kCohere2MoeDefaults = R"({"vocab_size": 256000, "hidden_size": 8192,
  "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64, "head_dim": 128,
  "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192, "tie_word_embeddings": true,
  "sliding_window": 4096, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 255001, "bos_token_id": 5})";

}  // namespace

extern const Architecture kCohere2Moe = {"Cohere2MoeForCausalLM", "cohere2_moe", ReadCohere2Moe, kCohere2MoeDefaults};

}  // namespace kvanta::models
