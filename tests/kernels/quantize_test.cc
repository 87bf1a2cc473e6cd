// Quantization of weights to blocks of 8 and 4 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/dtype.h"
#include "kernels/random_values.h"
#include "weights/weight_blocks.h"

namespace kvanta::kernels {
namespace {

double SquaredError(const weights::WeightBlock& block, const float* x, int n) {
  float values[weights::kBlockWeights];
  weights::DequantizeBlock(block, values);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += (double{values[i]} - x[i]) * (double{values[i]} - x[i]);
  return sum;
}

TEST(Quantize, Int8IsWithinHalfAStep) {
  const auto x = RandomValues(100 * 32, 11, 0.03F);
  for (int block = 0; block < 100; ++block) {
    const float* values = &x[block * 32];
    const int n = block % 32 + 1;
    const weights::WeightBlock q = weights::QuantizeInt8(values, n);
    float out[weights::kBlockWeights];
    weights::DequantizeBlock(q, out);
    for (int i = 0; i < weights::kBlockWeights; ++i) {
      // Half a step; where fp16 rounds the scale down, the largest code is clipped: 127 of its 2^-11.
      ASSERT_NEAR(out[i], i < n ? values[i] : 0, Fp16ToFloat(q.scale) * (i < n ? 0.5 + 127 * 0x1p-11 : 0));
    }
  }
}

TEST(Quantize, Int4HasASmallerErrorThanTheFullRange) {
  const auto x = RandomValues(400 * 32, 12, 0.03F);
  double best = 0;
  double plain = 0;
  for (int block = 0; block < 400; ++block) {
    const float* values = &x[block * 32];
    best += SquaredError(weights::QuantizeInt4(values, 32), values, 32);
    const auto [low, high] = std::minmax_element(values, values + 32);
    weights::WeightBlock range;
    range.scale = FloatToFp16((*high - *low) / 15);
    range.offset = FloatToFp16(*low);
    for (int i = 0; i < 32; ++i) {
      const float code = std::nearbyint((values[i] - Fp16ToFloat(range.offset)) / Fp16ToFloat(range.scale));
      range.codes[i] = static_cast<int8_t>(std::min(15.0F, std::max(0.0F, code)));
    }
    plain += SquaredError(range, values, 32);
  }
  EXPECT_LT(best, 0.9 * plain);
}

TEST(Quantize, Int4OfConstantsZerosAndPartialBlocks) {
  const std::vector<float> constant(32, -0.25F);
  EXPECT_EQ(SquaredError(weights::QuantizeInt4(constant.data(), 32), constant.data(), 32), 0);
  const std::vector<float> zeros(32);
  EXPECT_EQ(SquaredError(weights::QuantizeInt4(zeros.data(), 32), zeros.data(), 32), 0);
  const std::vector<float> two = {-1, 2};
  EXPECT_LT(SquaredError(weights::QuantizeInt4(two.data(), 2), two.data(), 2), 1e-5);
  // 16 equidistant values whose scale and offset fp16 represents exactly.
  std::vector<float> steps(32);
  for (int i = 0; i < 32; ++i) steps[i] = 0.125F * static_cast<float>(i % 16) - 0.5F;
  EXPECT_EQ(SquaredError(weights::QuantizeInt4(steps.data(), 32), steps.data(), 32), 0);
}

}  // namespace
}  // namespace kvanta::kernels
