// Sums of an indexer's scores over its heads, bit for bit on every unit.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "emulated/units.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/isa_table.h"
#include "kernels/random_values.h"

namespace kvanta::kernels {
namespace {

class WeightedScoresTest : public ::testing::TestWithParam<testing::Unit> {};

INSTANTIATE_TEST_SUITE_P(Units, WeightedScoresTest, ::testing::ValuesIn(testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

TEST_P(WeightedScoresTest, AreAddedRowAfterRow) {
  constexpr int kRows = 5, kGroups = 3;
  std::vector<float> scores = RandomValues(int64_t{kRows} * kMaxPageTokens, 1);
  scores[2 * kMaxPageTokens + 7] = std::nanf("");
  const std::vector<float> weights = RandomValues(kRows, 2), before = RandomValues(kMaxPageTokens, 3);
  std::vector<float> expected = before, found = before;
  for (size_t token = 0; token < size_t{16} * kGroups; ++token) {
    for (size_t row = 0; row < kRows; ++row) {
      const float score = scores[row * kMaxPageTokens + token];
      expected[token] += weights[row] * (score > 0 ? score : 0);  // 0 for NaN
    }
  }
  GetParam().table->attention->add_weighted_scores(scores.data(), weights.data(), kRows, kGroups, found.data());
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace kvanta::kernels
