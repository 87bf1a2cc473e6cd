// Configs of LFM2 and LFM2-MoE: widths of MLPs, layers of attention, parameters of the published models.
#include <gtest/gtest.h>

#include <vector>

#include "models/config_json.h"
#include "models/weight_count.h"

namespace kvanta::models {
namespace {

using nlohmann::json;

std::vector<int> AttentionLayers(const ModelConfig& config) {
  std::vector<int> layers;
  for (int layer = 0; layer < config.layers; ++layer) {
    if (!config.layer_specs[static_cast<size_t>(layer)].IsRecurrent()) layers.push_back(layer);
  }
  return layers;
}

// LFM2-1.2B as first published.
json Lfm2() {
  return {{"architectures", {"Lfm2ForCausalLM"}},
          {"model_type", "lfm2"},
          {"torch_dtype", "bfloat16"},
          {"block_auto_adjust_ff_dim", true},
          {"block_ff_dim", 12288},
          {"block_ffn_dim_multiplier", 1.0},
          {"block_multiple_of", 256},
          {"conv_L_cache", 3},
          {"conv_bias", false},
          {"full_attn_idxs", {2, 5, 8, 10, 12, 14}},
          {"hidden_size", 2048},
          {"num_hidden_layers", 16},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 8},
          {"norm_eps", 1e-5},
          {"rope_theta", 1000000.0},
          {"max_position_embeddings", 128000},
          {"vocab_size", 65536}};
}

TEST(Lfm2Config, FirstCheckpoints) {
  const ModelConfig config = Parse(Lfm2());
  EXPECT_EQ(AttentionLayers(config), (std::vector<int>{2, 5, 8, 10, 12, 14}));
  EXPECT_EQ(config.intermediate_size, 8192);
  EXPECT_EQ(config.layer_specs[0].intermediate_size, 8192);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(CountWeights(config).Parameters(), 1'170'340'608);
  EXPECT_EQ(config.State(config.layer_specs[0]).Bytes(), 2 * 2048 * 4);
  EXPECT_EQ(config.State(config.layer_specs[2]).Bytes(), 0);
}

TEST(Lfm2Config, WidthOfMlps) {
  const auto width = [](const json& config) { return Parse(config).intermediate_size; };
  EXPECT_EQ(width(With(Lfm2(), "block_auto_adjust_ff_dim", false)), 12288);
  EXPECT_EQ(width(With(Lfm2(), "block_ffn_dim_multiplier", 1.3)), 10752) << "10649, rounded up";
  EXPECT_EQ(width(With(Lfm2(), "block_ffn_dim_multiplier", nullptr)), 8192) << "not rounded";
  EXPECT_EQ(width(With(Lfm2(), "block_multiple_of", 5000)), 10000);
}

TEST(Lfm2Config, Experts) {
  json config = Lfm2();
  for (const char* key : {"block_ff_dim", "full_attn_idxs"}) config.erase(key);
  config["architectures"] = {"Lfm2MoeForCausalLM"};
  config["model_type"] = "lfm2_moe";
  config["num_hidden_layers"] = 24;
  for (int layer = 0; layer < 24; ++layer) {
    const bool attends = layer == 2 || layer == 6 || layer == 10 || layer == 14 || layer == 18 || layer == 21;
    config["layer_types"].push_back(attends ? "full_attention" : "conv");
  }
  const ModelConfig moe = Parse(config);
  EXPECT_EQ(AttentionLayers(moe), (std::vector<int>{2, 6, 10, 14, 18, 21}));
  EXPECT_FALSE(moe.layer_specs[1].moe);
  EXPECT_TRUE(moe.layer_specs[2].moe);
  EXPECT_EQ(moe.moe.num_experts, 32);
  EXPECT_EQ(moe.moe.num_experts_per_tok, 4);
  EXPECT_EQ(moe.intermediate_size, 7168);
  EXPECT_EQ(CountWeights(moe).Parameters(), 8'339'929'856 + 22 * 32) << "the hub does not count the experts' biases";
}

}  // namespace
}  // namespace kvanta::models
