#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/cell_layout.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/isa_table.h"

namespace kvanta::kernels {
namespace {

class AttentionTransposeTest : public ::testing::TestWithParam<testing::Unit> {};

INSTANTIATE_TEST_SUITE_P(Units, AttentionTransposeTest, ::testing::ValuesIn(testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

// Transposing codes in K's order gives V's order; bytes beyond the requested groups are unchanged.
TEST_P(AttentionTransposeTest, ConvertsKeyOrderToValueOrder) {
  std::mt19937 random(2);
  const formats::CellShape shape{.tokens = 64, .head_dim = 96};
  constexpr int kGroups = 3;
  for (const formats::Format& format : formats::All()) {
    if (format.scaling.token_group != 0) continue;
    SCOPED_TRACE(format.name);
    const formats::CellSections sections = formats::PlanCell(format, shape);
    std::vector<uint8_t> canonical(static_cast<size_t>(sections.bytes));
    for (uint8_t& byte : canonical) byte = static_cast<uint8_t>(random());
    std::vector<uint8_t> keys(canonical.size()), values(canonical.size());
    formats::FromCanonical(formats::SideKind::kK, format, shape, sections, canonical.data(), keys.data());
    formats::FromCanonical(formats::SideKind::kV, format, shape, sections, canonical.data(), values.data());
    std::vector<uint8_t> transposed(static_cast<size_t>(shape.tokens * sections.row_bytes), 0xee);
    std::vector<uint8_t> expected = transposed;
    std::copy_n(values.begin(), kGroups * 16 * sections.row_bytes, expected.begin());
    GetParam().table->attention->transpose({.keys = keys.data(),
                                            .row_bytes = sections.row_bytes,
                                            .element_bytes = std::max(8, format.code_bits) / 8,
                                            .groups = kGroups,
                                            .values = transposed.data()});
    EXPECT_EQ(transposed, expected);
  }
}

}  // namespace
}  // namespace kvanta::kernels
