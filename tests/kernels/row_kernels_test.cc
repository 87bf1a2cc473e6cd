// Row kernels of every unit against double; rows in parallel against rows alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numbers>
#include <vector>

#include "emulated/units.h"
#include "kernels/ops.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::Unit;

class RowTest : public ::testing::TestWithParam<Unit> {
 protected:
  const RowKernels& rows() const { return GetParam().table->rows; }
};

constexpr int64_t kWidths[] = {1, 5, 15, 16, 17, 40, 576};

TEST_P(RowTest, ExpIsAccurateOverItsWholeRange) {
  constexpr double kHighest = 88.72;  // below ln(FLT_MAX)
  std::vector<float> x;
  for (double value = -104; value < kHighest; value += 0.00137) x.push_back(static_cast<float>(value));
  for (int i = 0; i < 3000; ++i) x.push_back(static_cast<float>((i - 1500) * 1e-6));
  std::vector<float> out(x.size());
  rows().exp(x.data(), std::ssize(x), out.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(double{x[i]});
    ASSERT_NEAR(out[i], expected, kvanta::testing::kExpRelative * expected + kvanta::testing::kSubnormalStep) << x[i];
  }
}

TEST_P(RowTest, ExpOfLimits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float x[] = {-kInfinity, -1e30F, -200, 0, -0.0F, 89, 1e30F, kInfinity, std::nanf("")};
  float out[9];
  rows().exp(x, 9, out);
  const float expected[] = {0, 0, 0, 1, 1, kInfinity, kInfinity, kInfinity};
  for (int i = 0; i < 8; ++i) EXPECT_EQ(out[i], expected[i]) << x[i];
  EXPECT_TRUE(std::isnan(out[8]));
}

TEST_P(RowTest, MaxIsExactAndNanForNonFiniteRows) {
  for (const int64_t width : kWidths) {
    auto x = RandomValues(width, 8);
    EXPECT_EQ(rows().max(x.data(), width), *std::max_element(x.begin(), x.end())) << width;
    for (float& value : x) value = -std::abs(value) - 1;
    EXPECT_EQ(rows().max(x.data(), width), *std::max_element(x.begin(), x.end())) << width;
    for (const float value : {std::nanf(""), INFINITY, -INFINITY}) {
      for (const int64_t at : {int64_t{0}, width / 2, width - 1}) {
        auto other = x;
        other[static_cast<size_t>(at)] = value;
        EXPECT_TRUE(std::isnan(rows().max(other.data(), width))) << width << ", " << value << " at " << at;
      }
    }
  }
}

TEST_P(RowTest, RmsNormMatchesDouble) {
  for (const int64_t width : kWidths) {
    const auto x = RandomValues(width, 1, 3);
    const auto weight = RandomValues(width, 2);
    double squares = 0;
    for (const float value : x) squares += double{value} * value;
    const float eps = 1e-5F;
    std::vector<float> out(static_cast<size_t>(width) + 1, -77.0F);
    rows().rms_norm(x.data(), weight.data(), eps, width, out.data());
    for (int64_t i = 0; i < width; ++i) {
      const double expected = x[i] / std::sqrt(squares / static_cast<double>(width) + eps) * weight[i];
      ASSERT_NEAR(out[i], expected, kvanta::testing::RmsNormRelative(width) * std::abs(expected)) << width << ", " << i;
    }
    EXPECT_EQ(out[width], -77.0F);
    auto in_place = x;
    rows().rms_norm(in_place.data(), weight.data(), eps, width, in_place.data());
    EXPECT_TRUE(std::equal(in_place.begin(), in_place.end(), out.begin()));
  }
}

TEST_P(RowTest, LayerNormMatchesDouble) {
  const float eps = 1e-5F;
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(2), *GetParam().table);
  for (const int64_t width : kWidths) {
    constexpr int64_t kRows = 30;  // enough for several tasks
    const int64_t stride = width + 3;
    const auto x = RandomValues(kRows * stride, 20, 3), weight = RandomValues(width, 21),
               bias = RandomValues(width, 22);
    std::vector<float> out(static_cast<size_t>(kRows * stride), -77.0F);
    ops->LayerNorm(x.data(), stride, weight.data(), bias.data(), eps, kRows, width, out.data(), stride);
    for (int64_t row = 0; row < kRows; ++row) {
      const float* values = x.data() + row * stride;
      double mean = 0, squares = 0;
      for (int64_t i = 0; i < width; ++i) mean += values[i] / static_cast<double>(width);
      for (int64_t i = 0; i < width; ++i) squares += (values[i] - mean) * (values[i] - mean);
      const double deviation = std::sqrt(squares / static_cast<double>(width) + eps);
      for (int64_t i = 0; i < width; ++i) {
        const double expected = (values[i] - mean) / deviation * weight[i] + bias[i];
        const double terms =
            (std::abs(values[i]) + std::abs(mean)) / deviation * std::abs(weight[i]) + std::abs(bias[i]);
        ASSERT_NEAR(out[row * stride + i], expected, kvanta::testing::RmsNormRelative(width) * terms)
            << width << ", " << i;
      }
      EXPECT_EQ(out[row * stride + width], -77.0F);
      std::vector<float> alone(values, values + width);
      ops->LayerNorm(alone.data(), width, weight.data(), bias.data(), eps, 1, width, alone.data(), width);
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), out.begin() + row * stride)) << width << ", " << row;
    }
    std::vector<float> unbiased(static_cast<size_t>(width)), zeros(static_cast<size_t>(width)), biased(unbiased);
    ops->LayerNorm(x.data(), width, weight.data(), nullptr, eps, 1, width, unbiased.data(), width);
    ops->LayerNorm(x.data(), width, weight.data(), zeros.data(), eps, 1, width, biased.data(), width);
    EXPECT_EQ(unbiased, biased);
  }
}

TEST_P(RowTest, SquaredReluIsExact) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(2), *GetParam().table);
  auto x = RandomValues(50000, 23);
  const auto before = x;
  x.push_back(-77.0F);
  ops->Activate(Pointwise::kSquaredRelu, {}, x.data(), std::ssize(before));
  for (size_t i = 0; i < before.size(); ++i) ASSERT_EQ(x[i], before[i] > 0 ? before[i] * before[i] : 0) << i;
  EXPECT_EQ(x.back(), -77.0F);
  std::vector<float> limits = {std::nanf(""), -INFINITY, INFINITY};
  ops->Activate(Pointwise::kSquaredRelu, {}, limits.data(), 3);
  EXPECT_TRUE(std::isnan(limits[0]));
  EXPECT_THAT(std::vector<float>(limits.begin() + 1, limits.end()), ::testing::ElementsAre(0, INFINITY));
}

// x, by the formulas in double.
double ExactPointwise(Pointwise activation, const Xielu& xielu, double x) {
  switch (activation) {
    case Pointwise::kGelu:
      return x * std::erfc(-x / std::numbers::sqrt2) / 2;
    case Pointwise::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Pointwise::kRelu:
      return std::max(x, 0.0);
    case Pointwise::kSquaredRelu:
      return std::max(x, 0.0) * x;
    case Pointwise::kXielu:
      break;
  }
  return (x > 0 ? xielu.alpha_p * x * x : xielu.alpha_n * (std::expm1(x) - x)) + xielu.beta * x;
}

TEST_P(RowTest, ActivationsWithoutAGateMatchDouble) {
  using kvanta::testing::kUnitF32;
  const Xielu xielu{.alpha_p = 0.9F, .alpha_n = 1.7F, .beta = 0.5F};
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(2), *GetParam().table);
  for (const Pointwise activation :
       {Pointwise::kGelu, Pointwise::kGeluTanh, Pointwise::kRelu, Pointwise::kSquaredRelu, Pointwise::kXielu}) {
    auto x = RandomValues(50000, 23, 5);  // several tasks
    x[0] = -30;
    const auto before = x;
    x.push_back(-77.0F);
    ops->Activate(activation, xielu, x.data(), std::ssize(before));
    EXPECT_EQ(x.back(), -77.0F);
    for (size_t i = 0; i < 500; ++i) {
      const double value = before[i], expected = ExactPointwise(activation, xielu, value);
      // The argument of an exponential of up to x^2 rounds; terms of opposite signs of up to |x| are added.
      const double error = 8 * kUnitF32 * ((1 + value * value) * std::abs(expected) + std::abs(value));
      ASSERT_NEAR(x[i], expected, error) << static_cast<int>(activation) << ", " << value;
    }
    std::vector<float> limits = {std::nanf(""), before[7]};
    ops->Activate(activation, xielu, limits.data(), 2);
    EXPECT_TRUE(std::isnan(limits[0]));
    EXPECT_EQ(limits[1], x[7]);
  }
}

TEST_P(RowTest, SiluMulMatchesDouble) {
  for (const int64_t width : kWidths) {
    auto gate = RandomValues(width, 3, 10);
    gate[0] = -90;  // exp(90) is infinite in f32
    const auto up = RandomValues(width, 4);
    std::vector<float> out(static_cast<size_t>(width) + 1, -77.0F);
    rows().silu_mul(gate.data(), up.data(), width, out.data());
    for (int64_t i = 0; i < width; ++i) {
      const double expected = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
      ASSERT_NEAR(out[i], expected, kvanta::testing::kSiluRelative * std::abs(expected) + 0x1p-120) << gate[i];
    }
    EXPECT_EQ(out[width], -77.0F);
  }
}

TEST_P(RowTest, LimitedSiluMulMatchesDouble) {
  constexpr float kLimit = 1.5F;
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1), *GetParam().table);
  for (const int64_t width : kWidths) {
    std::vector<float> gate_up = RandomValues(width, 3, 10);
    const auto up = RandomValues(width, 4, 3);
    gate_up.insert(gate_up.end(), up.begin(), up.end());
    std::vector<float> out(static_cast<size_t>(width) + 1, -77.0F);
    ops->ActivateMul(Activation::kSilu, kLimit, gate_up.data(), 1, width, out.data(), nullptr);
    for (int64_t i = 0; i < width; ++i) {
      const double silu = std::min(gate_up[i] / (1 + std::exp(-double{gate_up[i]})), double{kLimit});
      const double expected = silu * std::clamp(up[i], -kLimit, kLimit);
      ASSERT_NEAR(out[i], expected, kvanta::testing::kSiluRelative * std::abs(expected) + 0x1p-120) << gate_up[i];
    }
    EXPECT_EQ(out[width], -77.0F);
  }
}

TEST_P(RowTest, GeluMulMatchesDouble) {
  for (const int64_t width : kWidths) {
    auto gate = RandomValues(width, 3, 4);
    gate[0] = -30;
    const auto up = RandomValues(width, 4);
    std::vector<float> out(static_cast<size_t>(width) + 1, -77.0F);
    rows().gelu_mul(gate.data(), up.data(), width, out.data());
    for (int64_t i = 0; i < width; ++i) {
      const double g = gate[i], u = std::sqrt(2 / std::numbers::pi) * (g + 0.044715 * g * g * g);
      const double expected = g / (1 + std::exp(-2 * u)) * up[i];
      const double relative = kvanta::testing::kSiluRelative + kvanta::testing::kUnitF32 * 5 * std::abs(2 * u);
      ASSERT_NEAR(out[i], expected, relative * std::abs(expected) + 0x1p-120) << g;
    }
    EXPECT_EQ(out[width], -77.0F);
  }
}

TEST_P(RowTest, SwigluOaiMulMatchesDouble) {
  for (const int64_t width : kWidths) {
    auto gate = RandomValues(width, 3, 6), up = RandomValues(width, 4, 6);
    gate[0] = -60;
    std::vector<float> out(static_cast<size_t>(width) + 1, -77.0F);
    rows().swiglu_oai_mul(gate.data(), up.data(), width, out.data());
    for (int64_t i = 0; i < width; ++i) {
      const double g = std::min(double{gate[i]}, 7.0), u = std::clamp(double{up[i]}, -7.0, 7.0);
      const double expected = (u + 1) * g / (1 + std::exp(-1.702 * g));
      // 1.702 and its product with g round once each; u + 1 may cancel.
      const double relative =
          kvanta::testing::kSiluRelative + kvanta::testing::kUnitF32 * (2 + 2 * 1.702 * std::abs(g));
      const double cancelled = kvanta::testing::kUnitF32 * std::abs(g);
      ASSERT_NEAR(out[i], expected, relative * std::abs(expected) + cancelled) << gate[i] << ", " << up[i];
    }
    EXPECT_EQ(out[width], -77.0F);
    gate[width - 1] = std::nanf("");
    up[0] = std::nanf("");
    rows().swiglu_oai_mul(gate.data(), up.data(), width, out.data());
    EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[width - 1]));
  }
}

TEST_P(RowTest, AddScaledRoundsTheProductAndTheSum) {
  for (const int64_t width : kWidths) {
    auto x = RandomValues(width, 12);
    const auto y = RandomValues(width, 13), before = x;
    x.push_back(-77.0F);
    rows().add_scaled(x.data(), y.data(), 0.3F, width);
    for (int64_t i = 0; i < width; ++i) {
      const float product = y[i] * 0.3F;
      ASSERT_EQ(x[i], before[i] + product) << width << ", " << i;
    }
    EXPECT_EQ(x[width], -77.0F);
  }
}

TEST_P(RowTest, AddGatedMatchesDouble) {
  constexpr int64_t kRows = 5, kWidth = 40;
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1), *GetParam().table);
  auto x = RandomValues(kRows * kWidth, 14);
  const auto y = RandomValues(kRows * kWidth, 15), before = x;
  const std::vector<float> gate = {-100, -1.5F, 0, 2, 100};
  ops->AddGated(x.data(), y.data(), gate.data(), kRows, kWidth);
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = before[i] + double{y[i]} / (1 + std::exp(-double{gate[i / kWidth]}));
    ASSERT_NEAR(x[i], expected, 8 * kvanta::testing::kUnitF32 * (std::abs(before[i]) + std::abs(y[i]))) << i;
  }
}

TEST_P(RowTest, ScaleRowsByPosition) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1), *GetParam().table);
  const std::vector<float> before = RandomValues(3 * 24, 16), factors = {1, 2.5F, -3};
  const std::vector<int64_t> positions = {2, 0, 1};
  std::vector<float> x = before;
  ops->ScaleRows(x.data(), 24, 3, 20, factors.data(), positions.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const float factor = i % 24 < 20 ? factors[static_cast<size_t>(positions[i / 24])] : 1;
    EXPECT_EQ(x[i], before[i] * factor) << i;
  }
}

TEST_P(RowTest, SoftcapMatchesDouble) {
  for (const int64_t width : kWidths) {
    const auto x = RandomValues(width, 5, 60);
    const float softcap = 30;
    auto out = x;
    out.push_back(-77.0F);
    rows().softcap(out.data(), softcap, width);
    for (int64_t i = 0; i < width; ++i) {
      ASSERT_NEAR(out[i], softcap * std::tanh(double{x[i]} / softcap), softcap * 8 * kvanta::testing::kUnitF32) << x[i];
    }
    EXPECT_EQ(out[width], -77.0F);
    const float limits[] = {-INFINITY, -1e30F, 0, 1e30F, INFINITY, std::nanf("")};
    float capped[6];
    std::copy_n(limits, 6, capped);
    rows().softcap(capped, softcap, 6);
    EXPECT_THAT(std::vector(capped, capped + 5), ::testing::ElementsAre(-30, -30, 0, 30, 30));
    EXPECT_TRUE(std::isnan(capped[5]));
  }
}

TEST_P(RowTest, SoftcapFindsTheFirstOfTheLargest) {
  constexpr int64_t kWidth = 40;
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1), *GetParam().table);
  auto x = RandomValues(3 * kWidth, 11);
  x[7] = 1e4F;
  x[9] = 1e5F;  // equal once capped
  x[kWidth + 3] = std::nanf("");
  RowArgmax argmaxes[3];
  ops->Softcap(x.data(), 3, kWidth, 2, argmaxes);
  EXPECT_EQ(argmaxes[0].column, 7);
  EXPECT_EQ(argmaxes[0].value, 2);
  EXPECT_FALSE(argmaxes[1].finite);
  const auto* row = x.data() + 2 * kWidth;
  EXPECT_TRUE(argmaxes[2].finite);
  EXPECT_EQ(argmaxes[2].column, std::max_element(row, row + kWidth) - row);
}

TEST_P(RowTest, RopeRotatesPairsOfEachHead) {
  for (const int half : {1, 4, 16, 20, 32}) {
    const int heads = 3;
    const int head_dim = 2 * half + 8;  // channels beyond the rotary ones stay
    const auto x = RandomValues(heads * head_dim, 5);
    std::vector<float> cos_sin(static_cast<size_t>(2 * half));
    for (int i = 0; i < half; ++i) {
      cos_sin[i] = std::cos(0.3F * static_cast<float>(i + 1));
      cos_sin[half + i] = std::sin(0.3F * static_cast<float>(i + 1));
    }
    for (const bool interleaved : {false, true}) {
      auto out = x;
      (interleaved ? rows().rope_interleaved : rows().rope)(out.data(), heads, head_dim, half, cos_sin.data());
      for (int head = 0; head < heads; ++head) {
        const float* in = x.data() + head * head_dim;
        const float* got = out.data() + head * head_dim;
        for (int i = 0; i < half; ++i) {
          const int low = interleaved ? 2 * i : i, high = interleaved ? 2 * i + 1 : half + i;
          const double a = in[low], b = in[high], cos = cos_sin[i], sin = cos_sin[half + i];
          const double tolerance = kvanta::testing::kRopeAbsolute * (std::abs(a) + std::abs(b));
          ASSERT_NEAR(got[low], a * cos - b * sin, tolerance);
          ASSERT_NEAR(got[high], b * cos + a * sin, tolerance);
        }
        for (int i = 2 * half; i < head_dim; ++i) ASSERT_EQ(got[i], in[i]);
      }
    }
  }
}

TEST_P(RowTest, AddIsOneRounding) {
  for (const int64_t width : kWidths) {
    const auto x = RandomValues(width, 6);
    const auto y = RandomValues(width, 7);
    auto out = x;
    rows().add(out.data(), y.data(), width);
    for (int64_t i = 0; i < width; ++i) ASSERT_EQ(out[i], x[i] + y[i]);
  }
}

TEST_P(RowTest, OpsAreBitIdenticalForAnyThreadCount) {
  constexpr int64_t kManyRows = 90;
  constexpr int64_t kWidth = 576;  // enough values for several tasks
  const auto x = RandomValues(kManyRows * kWidth, 8);
  const auto weight = RandomValues(kWidth, 9);
  std::vector<int64_t> positions;
  for (int64_t row = 0; row < kManyRows; ++row) positions.push_back(row % 7);
  const auto angles = RandomValues(7 * 64, 10);
  for (const int threads : {1, 3}) {
    const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(threads), *GetParam().table);
    std::vector<float> out(kManyRows * kWidth);
    std::vector<float> alone(kWidth);
    ops->RmsNorm(x.data(), kWidth, weight.data(), 1e-5F, kManyRows, kWidth, out.data(), kWidth);
    for (int64_t row = 0; row < kManyRows; ++row) {
      rows().rms_norm(x.data() + row * kWidth, weight.data(), 1e-5F, kWidth, alone.data());
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), out.begin() + row * kWidth));
    }
    ops->ActivateMul(Activation::kSilu, 0, x.data(), kManyRows / 2, kWidth, out.data(), nullptr);
    for (int64_t row = 0; row < kManyRows / 2; ++row) {
      rows().silu_mul(x.data() + 2 * row * kWidth, x.data() + (2 * row + 1) * kWidth, kWidth, alone.data());
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), out.begin() + row * kWidth));
    }
    ops->ActivateMul(Activation::kGeluTanh, 0, x.data(), kManyRows / 2, kWidth, out.data(), nullptr);
    for (int64_t row = 0; row < kManyRows / 2; ++row) {
      rows().gelu_mul(x.data() + 2 * row * kWidth, x.data() + (2 * row + 1) * kWidth, kWidth, alone.data());
      ASSERT_TRUE(std::equal(alone.begin(), alone.end(), out.begin() + row * kWidth));
    }
    out = x;
    ops->Scale(out.data(), 3.5F, std::ssize(out));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], x[i] * 3.5F);
    for (const bool interleaved : {false, true}) {
      const auto rotate = interleaved ? rows().rope_interleaved : rows().rope;
      out = x;
      ops->Rope(out.data(), kWidth, kManyRows, 9, 64, 64, {.interleaved = interleaved}, angles.data(),
                positions.data());
      for (int64_t row = 0; row < kManyRows; ++row) {
        alone.assign(x.begin() + row * kWidth, x.begin() + (row + 1) * kWidth);
        rotate(alone.data(), 9, 64, 32, angles.data() + positions[row] * 64);
        ASSERT_TRUE(std::equal(alone.begin(), alone.end(), out.begin() + row * kWidth));
      }
    }
    out = x;
    ops->Add(out.data(), x.data(), kManyRows * kWidth - 3);
    for (int64_t i = 0; i < kManyRows * kWidth; ++i) ASSERT_EQ(out[i], i < kManyRows * kWidth - 3 ? 2 * x[i] : x[i]);
    const weights::WeightView table{x.data(), DType::kF32, kManyRows, kWidth};
    const auto linear = ops->MakeLinear({&table, 1}, {}, WeightType::kF32);
    std::vector<int32_t> ids;
    for (int32_t row = 0; row < kManyRows; ++row) ids.push_back((row * 37) % kManyRows);
    ops->Embed(*linear, 0, ids.data(), kManyRows, out.data());
    for (int64_t row = 0; row < kManyRows; ++row) {
      ASSERT_TRUE(
          std::equal(out.begin() + row * kWidth, out.begin() + (row + 1) * kWidth, x.begin() + ids[row] * kWidth));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Units, RowTest, ::testing::ValuesIn(kvanta::testing::Units()),
                         [](const auto& param) { return param.param.name; });

}  // namespace
}  // namespace kvanta::kernels
