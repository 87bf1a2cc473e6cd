// The search for trellis codes: every instruction set finds the codes of the portable one.
#include "formats/trellis.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/trellis_levels.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::kernels {
namespace {

class TrellisSearchTest : public ::testing::TestWithParam<testing::Unit> {};
INSTANTIATE_TEST_SUITE_P(Units, TrellisSearchTest, ::testing::ValuesIn(testing::Units()),
                         [](const ::testing::TestParamInfo<testing::Unit>& unit) { return unit.param.name; });

// Targets whose distances tie, saturate, or are those of normal rows.
std::vector<int16_t> Targets(int kind, int head_dim, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 42 * 128);
  std::vector<int16_t> targets(static_cast<size_t>(head_dim));
  for (int16_t& target : targets) {
    const float x = normal(random);
    switch (kind) {
      case 0:
        target = static_cast<int16_t>(std::max(-32640.0F, std::min(32640.0F, x)));
        break;
      case 1:
        target = 0;
        break;
      case 2:
        target = static_cast<int16_t>(x < 0 ? -32640 : 32640);
        break;
      default:
        target = static_cast<int16_t>(random() % 64 == 0 ? 32640 : x / 64);
    }
  }
  return targets;
}

TEST_P(TrellisSearchTest, FindsTheCodesOfEveryOtherUnit) {
  const formats::TrellisSearch search = GetParam().table->attention->search_trellis;
  std::mt19937 random(6);
  for (int bits = 2; bits <= 4; ++bits) {
    for (const int head_dim : {32, 64, 128, 160, 512}) {
      for (int kind = 0; kind < 12; ++kind) {
        const std::vector<int16_t> targets = Targets(kind < 8 ? 0 : kind % 4, head_dim, random);
        std::vector<uint8_t> expected(targets.size()), codes(targets.size());
        formats::PortableTrellisSearch(bits, targets.data(), head_dim, expected.data());
        search(bits, targets.data(), head_dim, codes.data());
        ASSERT_EQ(codes, expected) << fmt::format("{} bits, {} channels, kind {}", bits, head_dim, kind);
      }
    }
  }
  for (const int head_dim : {8, 24}) {  // shorter than the window's reach on both sides
    const std::vector<int16_t> targets = Targets(0, head_dim, random);
    std::vector<uint8_t> expected(targets.size()), codes(targets.size());
    formats::PortableTrellisSearch(4, targets.data(), head_dim, expected.data());
    search(4, targets.data(), head_dim, codes.data());
    ASSERT_EQ(codes, expected) << head_dim;
  }
}

}  // namespace
}  // namespace kvanta::kernels
