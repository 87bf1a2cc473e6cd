// Row kernels of attention on every unit: softmax over pages, Hadamard transform, combination of split results.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "formats/transform.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention_cells.h"
#include "kernels/cpu/isa_table.h"
#include "normal_floats.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

class AttentionSoftmaxTest : public ::testing::TestWithParam<testing::Unit> {
 protected:
  const AttentionKernels& Kernels() const { return *GetParam().table->attention; }
};

INSTANTIATE_TEST_SUITE_P(Units, AttentionSoftmaxTest, ::testing::ValuesIn(testing::AllUnits()),
                         [](const auto& unit) { return unit.param.name; });

TEST_P(AttentionSoftmaxTest, SoftmaxOverPagesEqualsSoftmaxOverAll) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 5);
  std::vector<float> scores(kMaxPageTokens, std::nanf("")), logits;
  SoftmaxState state{-std::numeric_limits<float>::infinity(), 0};
  std::vector<double> p;
  for (int page = 0; page < 5; ++page) {
    const int begin = page == 0 ? 3 : 0, end = page == 4 ? 21 : 32;
    for (int t = begin; t < end; ++t) scores[static_cast<size_t>(t)] = normal(random);
    for (int t = begin; t < end; ++t) logits.push_back(scores[static_cast<size_t>(t)]);
    float rescale = 0;
    Kernels().softmax({.begin = begin,
                       .end = end,
                       .page_tokens = 32,
                       .rows = 1,
                       .softcap = 0,
                       .bias = nullptr,
                       .scores = scores.data(),
                       .state = &state,
                       .rescale = &rescale});
    for (double& x : p) x *= rescale;
    for (int t = 0; t < 32; ++t) {
      if (t >= begin && t < end) {
        p.push_back(scores[static_cast<size_t>(t)]);
      } else if (t >= begin / 16 * 16 && t < (end + 15) / 16 * 16) {
        EXPECT_EQ(scores[static_cast<size_t>(t)], 0) << "masked slot " << t;
      }
    }
  }
  double sum = 0;
  for (const float x : logits) sum += std::exp2(double{x} - state.max);
  EXPECT_NEAR(state.sum, sum, 32 * testing::kExpRelative * sum);
  for (size_t i = 0; i < p.size(); ++i) {
    EXPECT_NEAR(p[i], std::exp2(double{logits[i]} - state.max), 32 * testing::kExpRelative);
  }
}

// Scores, states and results of a page's rows.
struct SoftmaxRows {
  std::vector<float> scores = std::vector<float>(kPassRows * kMaxPageTokens);
  SoftmaxState state[kPassRows];
  float rescale[kPassRows] = {};

  SoftmaxRows() {
    NormalFloats normal;
    std::mt19937 random(5);
    for (float& x : scores) x = 5 * normal(random);
    for (SoftmaxState& row : state) row = {normal(random), 1};
    state[2].max = -std::numeric_limits<float>::infinity();
  }
  // The pass of `rows` rows from `first` on.
  SoftmaxPass Pass(int first, int rows, int begin, int end) {
    return {.begin = begin,
            .end = end,
            .page_tokens = 64,
            .rows = rows,
            .scores = &scores[static_cast<size_t>(first) * kMaxPageTokens],
            .state = state + first,
            .rescale = rescale + first};
  }
};

TEST_P(AttentionSoftmaxTest, RowsAreBatchInvariant) {
  for (const auto& [begin, end] : {std::pair(0, 64), std::pair(3, 37)}) {
    SoftmaxRows alone;
    for (int row = 0; row < kPassRows; ++row) Kernels().softmax(alone.Pass(row, 1, begin, end));
    for (const int rows : {2, 3, 4, 5, 7, 8, kPassRows}) {
      SoftmaxRows together;
      Kernels().softmax(together.Pass(0, rows, begin, end));
      EXPECT_EQ(std::memcmp(together.scores.data(), alone.scores.data(),
                            sizeof(float) * kMaxPageTokens * static_cast<size_t>(rows)),
                0);
      EXPECT_EQ(std::memcmp(together.state, alone.state, sizeof(SoftmaxState) * static_cast<size_t>(rows)), 0) << rows;
      EXPECT_EQ(std::memcmp(together.rescale, alone.rescale, sizeof(float) * static_cast<size_t>(rows)), 0) << rows;
    }
  }
}

// A softmax that packs its results has the bits of one that stores them and a value kernel that packs them.
TEST_P(AttentionSoftmaxTest, PackedProbabilitiesHaveTheBitsOfOthers) {
  constexpr formats::CellShape kShape{.tokens = 64, .head_dim = 64};
  for (const char* name : {"bf16", "fp8_e4m3", "fp8_e5m2"}) {
    const formats::Format& format = formats::OnSide(formats::Find(name), false);
    const ValueKernel& kernel = Kernels().values[static_cast<size_t>(format.code)];
    if (kernel.softmax == nullptr) continue;
    const Cell values = MakeCell(format, formats::SideKind::kV, kShape, 3);
    for (const auto& [begin, end] : {std::pair(0, 64), std::pair(3, 37)}) {
      SoftmaxRows rows[2];
      std::vector<float> out[2];
      for (const bool packed : {false, true}) {
        SoftmaxPass softmax = rows[packed].Pass(0, kPassRows, begin, end);
        softmax.operands = Workspace();
        softmax.value_scale = 0.3f;
        (packed ? kernel.softmax : Kernels().softmax)(softmax);
        out[packed].resize(kPassRows * kShape.head_dim, 1);
        AccumulateValues(kernel, {.cell = values.view,
                                  .begin = begin,
                                  .end = end,
                                  .rows = kPassRows,
                                  .p = packed ? nullptr : softmax.scores,
                                  .scale = softmax.value_scale,
                                  .rescale = softmax.rescale,
                                  .out = out[packed].data(),
                                  .out_stride = kShape.head_dim,
                                  .workspace = Workspace(),
                                  .prefetch = {}});
      }
      EXPECT_EQ(std::memcmp(rows[0].state, rows[1].state, sizeof rows[0].state), 0) << name;
      EXPECT_EQ(std::memcmp(out[0].data(), out[1].data(), out[0].size() * sizeof(float)), 0) << name << " to " << end;
    }
  }
}

TEST_P(AttentionSoftmaxTest, TransformIsBitIdenticalToFormats) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int head_dim : {8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512}) {
    std::vector<float> x(static_cast<size_t>(head_dim));
    for (float& value : x) value = normal(random);
    x[3] = 0x1p-140F;  // subnormal
    x[5] = -x[4];      // cancels exactly
    std::vector<float> expected = x, out(x.size());
    formats::Hadamard(expected.data(), head_dim);
    Kernels().transform(x.data(), head_dim, out.data());
    const auto same = [&](const std::vector<float>& result) {
      return std::memcmp(result.data(), expected.data(), x.size() * sizeof(float)) == 0;
    };
    EXPECT_TRUE(same(out)) << head_dim;
    Kernels().transform(x.data(), head_dim, x.data());
    EXPECT_TRUE(same(x)) << head_dim << " in place";
  }
}

TEST_P(AttentionSoftmaxTest, CombiningWithAnEmptyStateIsTheIdentity) {
  const float inf = std::numeric_limits<float>::infinity();
  SoftmaxState state{2.0f, 3.0f};
  const SoftmaxState empty{-inf, 0};
  std::vector<float> out = {1, -2, 3, -0.0f, 5, 6, 7, 8};
  const std::vector<float> before = out, garbage(8, std::nanf(""));
  Kernels().combine(state, out.data(), empty, garbage.data(), 8);
  EXPECT_EQ(std::memcmp(out.data(), before.data(), 32), 0);
  EXPECT_EQ(state.sum, 3.0f);
  SoftmaxState first = empty;
  std::vector<float> target = garbage;
  Kernels().combine(first, target.data(), state, out.data(), 8);
  EXPECT_EQ(target, out);
  EXPECT_EQ(first.max, 2.0f);
}

}  // namespace
}  // namespace kvanta::kernels
