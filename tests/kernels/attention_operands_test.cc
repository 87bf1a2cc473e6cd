// Precision and range of the operands of attention kernels on every unit: prepared queries, scaled probabilities.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "emulated/units.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention_cells.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

class AttentionOperandsTest : public ::testing::TestWithParam<testing::Unit> {
 protected:
  const AttentionKernels& Kernels() const { return *GetParam().table->attention; }

 private:
  KernelScope scope_{Kernels()};
};

INSTANTIATE_TEST_SUITE_P(Units, AttentionOperandsTest, ::testing::ValuesIn(testing::AllUnits()),
                         [](const auto& unit) { return unit.param.name; });

// Scores of a query on the tokens of a cell without scales per channel.
std::vector<float> ScoresOf(const KeyKernel& key, const Cell& keys, const std::vector<float>& q) {
  alignas(64) uint8_t query[4096];
  const float row_scale = key.prepare(q.data(), keys.shape.head_dim, 0, query);
  std::vector<float> scores(kMaxPageTokens);
  key.score({.cell = keys.view,
             .groups = keys.shape.tokens / 16,
             .rows = 1,
             .query = query,
             .query_stride = key.query_bytes(keys.shape.head_dim),
             .row_scale = &row_scale,
             .scores = scores.data(),
             .workspace = Workspace(),
             .prefetch = {}});
  return scores;
}

// Values of a cell weighted by p, of all of its tokens; p null: left in the workspace by ValueKernel::softmax.
std::vector<float> SumOf(const ValueKernel& kernel, const Cell& values, const float* p, float scale) {
  const float rescale = 0;
  std::vector<float> out(static_cast<size_t>(values.shape.head_dim));
  AccumulateValues(kernel, {.cell = values.view,
                            .begin = 0,
                            .end = values.shape.tokens,
                            .rows = 1,
                            .p = p,
                            .scale = scale,
                            .rescale = &rescale,
                            .out = out.data(),
                            .out_stride = values.shape.head_dim,
                            .workspace = Workspace(),
                            .prefetch = {}});
  return out;
}

// Kernels of bf16 cells next to quantized ones, whose operands no unit rounds to bf16.
TEST_P(AttentionOperandsTest, ExactKernelsKeepOperandsOf16Bits) {
  constexpr float kOperand = 1 + 0x1p-12F;  // 1 in bf16
  constexpr int kToken = 7, kChannel = 5, kHeadDim = 128;
  constexpr uint32_t kOne = 0x3f80;  // the first code, followed by larger ones
  constexpr formats::CellShape kShape{64, kHeadDim};
  const formats::Format& format = formats::Find("bf16");
  const Cell keys = MakeCell(format, formats::SideKind::kK, kShape, kOne);
  std::vector<float> q(kHeadDim);
  q[kChannel] = kOperand;
  const std::vector<float> scores = ScoresOf(Kernels().exact_keys, keys, q);
  for (int token = 0; token < kShape.tokens; ++token) {
    const float expected = keys.values[static_cast<size_t>(token * kHeadDim + kChannel)] * kOperand;
    ASSERT_NEAR(scores[static_cast<size_t>(token)], expected, expected * 0x1p-16) << token;
  }
  const Cell values = MakeCell(format, formats::SideKind::kV, kShape, kOne);
  std::vector<float> p(kMaxPageTokens);
  p[kToken] = kOperand;
  const std::vector<float> out = SumOf(Kernels().exact_values, values, p.data(), 1);
  for (int c = 0; c < kHeadDim; ++c) {
    const float expected = values.values[static_cast<size_t>(kToken * kHeadDim + c)] * kOperand;
    ASSERT_NEAR(out[static_cast<size_t>(c)], expected, expected * 0x1p-16) << c;
  }
}

struct LargestCode {
  const char* format;
  uint8_t code;
  float value;
};
constexpr LargestCode kLargestCodes[] = {{"fp8_e4m3", 0x7e, 448}, {"fp8_e5m2", 0x7b, 57344}};
constexpr formats::CellShape kLargestShape{kMaxPageTokens, 256};

Cell CellOf(const LargestCode& largest, formats::SideKind kind) {
  Cell cell = MakeCell(formats::Find(largest.format), kind, kLargestShape, 0);
  std::fill_n(cell.bytes.begin() + cell.sections.codes, kLargestShape.tokens * kLargestShape.head_dim, largest.code);
  return cell;
}

// Units that add in fp16 reach its largest number only with operands and codes that are all as large as possible.
TEST_P(AttentionOperandsTest, ScoresOfTheLargestCodesAreFinite) {
  constexpr int kHeadDim = kLargestShape.head_dim;
  for (const LargestCode& largest : kLargestCodes) {
    const Cell keys = CellOf(largest, formats::SideKind::kK);
    const formats::ElementType code = formats::Find(largest.format).code;
    const double relative = testing::OperandsOfFloats(Kernels().OperandsOf(code)).Relative();
    for (const float operand : {1.0F, 3e4F, -7e-5F}) {
      const std::vector<float> q(kHeadDim, operand);
      const double expected = double{kHeadDim} * largest.value * operand;
      for (const float score : ScoresOf(Kernels().keys[static_cast<int>(code)], keys, q))
        ASSERT_NEAR(score, expected, relative * std::abs(expected)) << largest.format;
    }
  }
}

TEST_P(AttentionOperandsTest, SumsOfTheLargestValuesAreFinite) {
  constexpr int kTokens = kLargestShape.tokens;
  constexpr float kScale = 0.37F;
  for (const LargestCode& largest : kLargestCodes) {
    const Cell values = CellOf(largest, formats::SideKind::kV);
    const formats::ElementType code = formats::Find(largest.format).code;
    const double expected = double{kTokens} * largest.value * kScale;
    const double tolerance = (testing::OperandsOfFloats(Kernels().OperandsOf(code)).Relative() + 1e-6) * expected;
    const ValueKernel& kernel = Kernels().values[static_cast<int>(code)];
    const std::vector<float> p(kMaxPageTokens, 1.0F);
    for (const float sum : SumOf(kernel, values, p.data(), kScale))
      ASSERT_NEAR(sum, expected, tolerance) << largest.format;
    if (kernel.softmax == nullptr) continue;
    std::vector<float> scores(kMaxPageTokens);  // p is 1 for all
    SoftmaxState state{-std::numeric_limits<float>::infinity(), 0};
    float unused[1];
    kernel.softmax({.begin = 0,
                    .end = kTokens,
                    .page_tokens = kTokens,
                    .rows = 1,
                    .scores = scores.data(),
                    .operands = Workspace(),
                    .value_scale = kScale,
                    .state = &state,
                    .rescale = unused});
    for (const float sum : SumOf(kernel, values, nullptr, kScale))
      ASSERT_NEAR(sum, expected, tolerance) << largest.format << " by softmax";
  }
}

}  // namespace
}  // namespace kvanta::kernels
