#include "runner/pooler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kvanta::runner {
namespace {

using Values = std::vector<float>;

Pooler Raw(PoolingType type, double hidden_scale = 1) {
  return {PoolingParams{.pooling_type = type, .normalize = false}, 2, hidden_scale};
}

TEST(Pooler, TakesTheRowsOfItsType) {
  const Pooler mean = Raw(PoolingType::kMean);
  EXPECT_TRUE(mean.ReadsEveryToken());
  EXPECT_EQ(mean.FirstRow(5, false), 0);
  EXPECT_EQ(mean.FirstRow(5, true), 0);
  const Pooler last = Raw(PoolingType::kLast);
  EXPECT_FALSE(last.ReadsEveryToken());
  EXPECT_EQ(last.FirstRow(5, false), 5);
  EXPECT_EQ(last.FirstRow(5, true), 4);
}

TEST(Pooler, MeanOverChunks) {
  Pooler pooler = Raw(PoolingType::kMean);
  pooler.Add(0, Values{1, 10, 2, 20});
  pooler.Add(2, Values{6, 60});
  EXPECT_EQ(pooler.Finish(), (Values{3, 30}));
  pooler.Add(0, Values{5, 7});  // preempted: begins anew
  EXPECT_EQ(pooler.Finish(), (Values{5, 7}));
}

TEST(Pooler, LastRowBehindAPrefixHit) {
  Pooler pooler = Raw(PoolingType::kLast);
  pooler.Add(128, Values{0.1F, -3});
  EXPECT_EQ(pooler.Finish(), (Values{0.1F, -3})) << "a state is not rounded";
}

// A sum in f32 would stay at 2^24.
TEST(Pooler, SumsInDoublePrecision) {
  Pooler pooler = Raw(PoolingType::kMean);
  pooler.Add(0, Values{16777216, 0});
  for (int i = 1; i < 16; ++i) pooler.Add(i, Values{1, 0});
  EXPECT_EQ(pooler.Finish().front(), static_cast<float>((16777216.0 + 15) / 16));
}

TEST(Pooler, TruncatesBeforeItNormalizes) {
  Pooler pooler({.dimensions = 2}, 3, 1);
  pooler.Add(0, Values{3, -4, 100});
  EXPECT_EQ(pooler.Finish(), (Values{0.6F, -0.8F}));
  Pooler zeros({}, 2, 1);
  zeros.Add(0, Values{0, 0});
  EXPECT_EQ(zeros.Finish(), (Values{0, 0}));
}

TEST(Pooler, ProjectsBeforeItTruncates) {
  const models::DenseModule modules[] = {
      {.in = 2, .out = 3, .weight = {1, 0, 0, 1, 1, 1}, .bias = {0, 0, -1}, .tanh = true},
      {.in = 3, .out = 2, .weight = {2, 0, 0, 0, 0, 4}, .bias = {}}};
  const PoolingParams raw{.pooling_type = PoolingType::kMean, .normalize = false};
  Pooler pooler(raw, 2, 0.5, modules);
  pooler.Add(0, Values{1, 2, 3, 4});  // mean 2, 3, scaled 1, 1.5
  EXPECT_EQ(pooler.Finish(), (Values{static_cast<float>(2 * std::tanh(1.0)), static_cast<float>(4 * std::tanh(1.5))}));
  PoolingParams one = raw;
  one.dimensions = 1;
  Pooler cut(one, 2, 1, modules);
  cut.Add(0, Values{0.5F, 0});
  EXPECT_EQ(cut.Finish(), Values{static_cast<float>(2 * std::tanh(0.5))});
}

TEST(Pooler, UndoesTheScaleOfTheLastNorm) {
  Pooler pooler = Raw(PoolingType::kLast, 8);
  pooler.Add(0, Values{0.25F, -1});
  EXPECT_EQ(pooler.Finish(), (Values{2, -8}));
}

TEST(Pooler, GivesNothingForStatesThatAreNotFinite) {
  for (const float bad : {NAN, INFINITY}) {
    Pooler pooler({}, 2, 1);
    pooler.Add(0, Values{1, bad});
    pooler.Add(1, Values{1, 1});
    EXPECT_TRUE(pooler.Finish().empty());
  }
  Pooler large({}, 2, 1);
  large.Add(0, Values{3e38F, 3e38F});
  EXPECT_EQ(large.Finish(), (Values{std::sqrt(0.5F), std::sqrt(0.5F)})) << "squares that f32 could not hold";
}

}  // namespace
}  // namespace kvanta::runner
