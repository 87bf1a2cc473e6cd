// The search for keys with uneven bits: every instruction set finds the codes of the portable one.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/klt.h"
#include "formats/klt_search.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::kernels {
namespace {

class KltSearchTest : public ::testing::TestWithParam<testing::Unit> {};
INSTANTIATE_TEST_SUITE_P(Units, KltSearchTest, ::testing::ValuesIn(testing::Units()),
                         [](const ::testing::TestParamInfo<testing::Unit>& unit) { return unit.param.name; });

TEST_P(KltSearchTest, FindsTheCodesOfEveryOtherUnit) {
  const formats::KltSearch search = GetParam().table->attention->search_klt;
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 42 * formats::kKltUnit);
  for (const int head_dim : {16, 64, 128, 256}) {
    for (const double octaves : {0.0, 2.0, 5.0, 9.0}) {
      for (const int mean_bits : {2, 3}) {
        std::vector<float> deviations;
        for (int i = 0; i < head_dim; ++i) {
          deviations.push_back(static_cast<float>(std::exp2(-octaves * i / head_dim)));
        }
        const formats::BitAllocation allocation = formats::AllocateBits(deviations, mean_bits);
        if (allocation.scalar_blocks == allocation.coded_blocks) continue;
        for (int kind = 0; kind < 6; ++kind) {  // normal rows, ties, and the largest targets
          std::vector<int16_t> targets;
          for (int i = 0; i < head_dim; ++i) {
            const float x = kind == 4 ? 0 : kind == 5 ? (normal(random) < 0 ? -1e9F : 1e9F) : normal(random);
            const float limit = formats::kMaxKltTarget;
            targets.push_back(static_cast<int16_t>(std::clamp(x, -limit, limit)));
          }
          std::vector<uint8_t> expected(targets.size()), codes(targets.size());
          formats::PortableKltSearch(allocation, targets.data(), expected.data());
          search(allocation, targets.data(), codes.data());
          ASSERT_EQ(codes, expected) << fmt::format("{} channels, {} octaves, {} bits, kind {}", head_dim, octaves,
                                                    mean_bits, kind);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels
