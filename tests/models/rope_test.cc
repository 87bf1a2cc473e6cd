#include "models/blocks/rope.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>

#include "models/rope_golden.h"

namespace kvanta::models {
namespace {

int64_t UlpsApart(float a, float b) {
  return std::abs(int64_t{std::bit_cast<int32_t>(a)} - int64_t{std::bit_cast<int32_t>(b)});
}

// transformers' power function errs by up to 1 ulp, the formulas round 2 to 4 times.
constexpr int64_t kUlps = 4;

void ExpectLike(const RopeSpec& rope, const golden::RopeGolden& expected, int64_t positions = 8192) {
  const RopeFrequencies found = MakeRopeFrequencies(rope, positions);
  ASSERT_EQ(found.inverse.size(), expected.inverse.size());
  EXPECT_LE(UlpsApart(found.attention_scaling, expected.attention_scaling), 1);
  for (size_t i = 0; i < found.inverse.size(); ++i) {
    EXPECT_LE(UlpsApart(found.inverse[i], expected.inverse[i]), kUlps) << i << ": " << found.inverse[i];
  }
}

RopeSpec Rope(RopeType type, double theta, double factor, int64_t original) {
  RopeSpec rope;
  rope.rotary_dim = 64;
  rope.type = type;
  rope.theta = theta;
  rope.factor = factor;
  rope.original_max_position = original;
  return rope;
}

TEST(Rope, FrequenciesOfTransformers) {
  ExpectLike(Rope(RopeType::kDefault, 500000, 1, 8192), golden::kDefault);
  ExpectLike(Rope(RopeType::kLinear, 10000, 3, 8192), golden::kLinear);
  ExpectLike(Rope(RopeType::kLlama3, 500000, 8, 2048), golden::kLlama3);
  RopeSpec yarn = Rope(RopeType::kYarn, 10000, 4, 2048);
  yarn.beta_fast = 24;
  yarn.beta_slow = 2;
  ExpectLike(yarn, golden::kYarn);
  yarn = Rope(RopeType::kYarn, 1e6, 16, 1024);
  yarn.mscale = 0.7;
  yarn.mscale_all_dim = 1.1;
  yarn.truncate = false;
  ExpectLike(yarn, golden::kYarnUntruncated);
  RopeSpec longrope = Rope(RopeType::kLongRope, 10000, 4, 2048);
  for (int i = 0; i < 32; ++i) {
    longrope.short_factor.push_back(1 + static_cast<float>(i) / 32);
    longrope.long_factor.push_back(1 + static_cast<float>(i * i) / 16);
  }
  ExpectLike(longrope, golden::kLongRopeShort, 2048);
  ExpectLike(longrope, golden::kLongRopeLong, 2049);
}

TEST(Rope, TableHoldsCosThenSin) {
  RopeFrequencies frequencies{{1.0F, 0.125F}, 2.0F};
  std::vector<float> table(3 * 4);
  FillRopeTable(frequencies, table);
  EXPECT_EQ(table[0], 2.0F);
  EXPECT_EQ(table[2], 0.0F);
  EXPECT_FLOAT_EQ(table[2 * 4 + 0], 2 * std::cos(2.0F));
  EXPECT_FLOAT_EQ(table[2 * 4 + 1], 2 * std::cos(0.25F));
  EXPECT_FLOAT_EQ(table[2 * 4 + 2], 2 * std::sin(2.0F));
  EXPECT_FLOAT_EQ(table[2 * 4 + 3], 2 * std::sin(0.25F));
}

}  // namespace
}  // namespace kvanta::models
