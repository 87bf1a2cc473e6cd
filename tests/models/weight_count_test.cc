#include "models/weight_count.h"

#include <gtest/gtest.h>

#include <limits>

#include "kvanta/error.h"

namespace kvanta::models {
namespace {

using kernels::WeightType;

// hidden 8, two heads of 8 with one KV head, ffn 16, vocabulary 10.
ModelConfig Small() {
  ModelConfig config;
  config.hidden = 8;
  config.layers = 3;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.intermediate_size = 16;
  config.vocab = 10;
  FillLayerSpecs(config);
  return config;
}

constexpr int64_t kBlock = 8 * (16 + 2 * 8) + 16 * 8 + 3 * 8 * 16;

TEST(WeightCount, CountsMatricesAndNorms) {
  const WeightCount count = CountWeights(Small());
  EXPECT_EQ(count.matrices, 3 * kBlock);
  EXPECT_EQ(count.embeddings, 2 * 80);
  EXPECT_EQ(count.vectors, 3 * 16 + 8);
  EXPECT_EQ(count.Parameters(), count.matrices + count.embeddings + count.vectors);
  EXPECT_EQ(count.Bytes(WeightType::kBf16), 2 * (count.matrices + count.embeddings) + 4 * count.vectors);
  EXPECT_EQ(count.Bytes(WeightType::kF32), 4 * count.Parameters());
  EXPECT_EQ(count.Bytes(WeightType::kInt8), (count.matrices + count.embeddings) * 34 / 32 + 4 * count.vectors);
  EXPECT_EQ(count.Bytes(WeightType::kInt4), count.matrices * 20 / 32 + count.embeddings * 34 / 32 + 4 * count.vectors)
      << "embeddings keep 8 bits";
}

// Blocks of 128 columns: a scale of 4 bytes for 128 codes of a column.
TEST(WeightCount, CountsQuantizedWeightsAsKept) {
  ModelConfig config = Small();
  config.quantization.method = weights::QuantMethod::kFp8;
  config.quantization.format = {weights::CodeType::kE4M3, weights::GroupScale::kF32, 128};
  const WeightCount count = CountWeights(config);
  EXPECT_EQ(count.quantized, count.matrices);
  EXPECT_EQ(count.Bytes(WeightType::kBf16, true),
            count.matrices * 132 / 128 + 2 * count.embeddings + 4 * count.vectors);
  EXPECT_EQ(count.Bytes(WeightType::kBf16), CountWeights(Small()).Bytes(WeightType::kBf16));
  config.quantization.ignored = {"re:.*self_attn.*", "model.layers.1.mlp"};
  EXPECT_EQ(CountWeights(config).quantized, 2 * 3 * 8 * 16);
}

TEST(WeightCount, CountsWhatArchitecturesAdd) {
  ModelConfig config = Small();
  const int64_t plain = CountWeights(config).vectors;
  config.qkv_bias = true;
  EXPECT_EQ(CountWeights(config).vectors, plain + 3 * 32);
  config.o_bias = true;
  EXPECT_EQ(CountWeights(config).vectors, plain + 3 * (32 + 8));
  config.mlp.bias = true;
  EXPECT_EQ(CountWeights(config).vectors, plain + 3 * (32 + 8 + 2 * 16 + 8));
  config.qk_norm = QkNorm::kPerHead;
  EXPECT_EQ(CountWeights(config).vectors, plain + 3 * (32 + 8 + 2 * 16 + 8 + 16));
  config.qk_norm = QkNorm::kAllHeads;
  EXPECT_EQ(CountWeights(config).vectors, plain + 3 * (32 + 8 + 2 * 16 + 8 + 24));
  config.qk_norm = QkNorm::kPerHead;
  config.names.post_mlp_norm = "post_feedforward_layernorm";
  EXPECT_EQ(CountWeights(config).vectors, plain + 3 * (32 + 8 + 2 * 16 + 8 + 16 + 8));
  config.tied_embeddings = true;
  EXPECT_EQ(CountWeights(config).embeddings, 80);
}

// DeepSeek-V2-Lite has 15,706,484,224 parameters by its own count.
TEST(WeightCount, CountsLatentsAndExperts) {
  ModelConfig config;
  config.hidden = 2048;
  config.layers = 27;
  config.heads = 16;
  config.intermediate_size = 10944;
  config.vocab = 102400;
  config.mla = {.kv_lora_rank = 512, .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128};
  config.moe = {.num_experts = 64,
                .num_experts_per_tok = 6,
                .moe_intermediate_size = 1408,
                .shared_expert_intermediate_size = 2 * 1408};
  config.layer_specs.resize(27, {.visibility = {}, .rope = {}, .moe = true});
  config.layer_specs[0].moe = false;
  FillLayerSpecs(config);
  EXPECT_EQ(CountWeights(config).Parameters(), 15'706'484'224);
}

TEST(WeightCount, RefusesWhatNoMachineHolds) {
  ModelConfig config = Small();
  config.hidden = config.intermediate_size = 1 << 24;
  config.layers = 4096;
  config.layer_specs.clear();
  FillLayerSpecs(config);
  EXPECT_THROW(CountWeights(config), InputError);
}

}  // namespace
}  // namespace kvanta::models
