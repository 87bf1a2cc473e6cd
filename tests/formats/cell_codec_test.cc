// Properties of transforms and of encoding then decoding a cell.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "formats/cell_codec.h"
#include "formats/rounding.h"
#include "formats/transform.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

std::vector<float> Normal(size_t n, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> x(n);
  for (float& value : x) value = normal(random);
  return x;
}

double Energy(std::span<const float> x) {
  double sum = 0;
  for (const float value : x) sum += double{value} * value;
  return sum;
}

double RelativeError(std::span<const float> x, std::span<const float> y) {
  double error = 0;
  for (size_t i = 0; i < x.size(); ++i) error += (double{x[i]} - y[i]) * (double{x[i]} - y[i]);
  return error / Energy(x);
}

TEST(Hadamard, BlockIsTheLargestPowerOfTwoThatDivides) {
  for (const auto& [head_dim, block] :
       {std::pair{8, 8}, {64, 64}, {80, 16}, {96, 32}, {112, 16}, {128, 128}, {192, 64}}) {
    EXPECT_EQ(HadamardBlock(head_dim), block);
  }
}

TEST(Hadamard, KeepsEnergyAndIsItsOwnInverse) {
  for (const int head_dim : {8, 32, 64, 80, 96, 128, 192, 256}) {
    const auto x = Normal(static_cast<size_t>(head_dim), 3.0F, 5);
    auto y = x;
    Hadamard(y.data(), head_dim);
    EXPECT_GT(RelativeError(x, y), 0.1);  // it does something
    // Each of log2(n) stages and the final multiply round once, by 2^-24 relative to the stage's largest sum.
    EXPECT_NEAR(Energy(y) / Energy(x), 1.0, 1e-6);
    Hadamard(y.data(), head_dim);
    EXPECT_LT(RelativeError(x, y), 1e-12);
  }
}

TEST(Hadamard, EntriesAreSignsOverTheSquareRoot) {
  for (const int head_dim : {16, 80}) {
    const int block = HadamardBlock(head_dim);
    for (int j = 0; j < head_dim; ++j) {
      std::vector<float> unit(static_cast<size_t>(head_dim), 0.0F);
      unit[static_cast<size_t>(j)] = 1.0F;
      Hadamard(unit.data(), head_dim);
      for (int i = 0; i < head_dim; ++i) {
        const bool same_block = i / block == j / block;
        const int sign =
            __builtin_popcount(static_cast<unsigned>(i % block) & static_cast<unsigned>(j % block)) % 2 ? -1 : 1;
        EXPECT_EQ(unit[static_cast<size_t>(i)], same_block ? static_cast<float>(sign) * 0.25F : 0.0F);
      }
    }
  }
}

TEST(RoundToInt, IsRoundToNearestEven) {
  for (int i = -4000; i <= 4000; ++i) {
    const float x = static_cast<float>(i) / 8.0F;
    EXPECT_EQ(RoundToInt(x), static_cast<int32_t>(std::nearbyint(x))) << x;
  }
}

// Worst case of one element, relative to the largest magnitude of the group that shares its scale.
// int8: half a step of amax/127, plus fp16's relative 2^-11 on the scale: amax * (0.5/127 + 2^-11).
// int4: d = amax/8; a code is off by at most half a step, or a whole one where +8 was clamped to 7; the least-squares
// scale lies within 8/7 of d: bounded by amax * (1/8 + 1/7 + 2^-11).
TEST(CellCodec, ErrorsStayWithinTheStep) {
  for (const float deviation : {1e-4F, 1.0F, 300.0F}) {
    const CellShape shape{32, 64};
    const auto x = Normal(static_cast<size_t>(32 * 64), deviation, 11);
    const auto check = [&](const char* name, int group, double bound) {
      const KvScheme scheme = KvScheme::Parse(name);
      const auto y = DecodeCell(scheme, SideKind::kK, EncodeCell(scheme, SideKind::kK, x, shape), shape);
      for (size_t begin = 0; begin < x.size(); begin += static_cast<size_t>(group)) {
        float amax = 0;
        for (int i = 0; i < group; ++i) amax = std::max(amax, std::abs(x[begin + static_cast<size_t>(i)]));
        for (int i = 0; i < group; ++i) {
          const size_t at = begin + static_cast<size_t>(i);
          ASSERT_LE(std::abs(x[at] - y[at]), amax * bound + 6e-8 * 127)
              << name << " " << deviation;  // fp16 subnormal scales
        }
      }
    };
    check("int8-hadamard", 64, 0.5 / 127 + std::ldexp(1.0, -11));
    check("int4-hadamard", 32, 1.0 / 8 + 1.0 / 7 + std::ldexp(1.0, -11));
  }
}

// Relative squared error on N(0,1): measured once by the independent implementation in tests/oracle, +- 5 %.
TEST(CellCodec, DistortionIsThatOfTheFormat) {
  const CellShape shape{128, 128};
  const auto x = Normal(static_cast<size_t>(128 * 128), 1.0F, 2);
  const std::vector<std::pair<const char*, double>> expected = {
      {"fp32", 0.0},         {"bf16", 2.7e-6}, {"fp16", 4.3e-8}, {"fp8_e4m3", 6.9e-4},
      {"fp8_e5m2", 2.75e-3}, {"int8", 4.0e-5}, {"int4", 6.9e-3}};
  ASSERT_EQ(expected.size(), All().size());
  for (const auto& [name, distortion] : expected) {
    const KvScheme scheme = KvScheme::Parse(name);
    const auto y = DecodeCell(scheme, SideKind::kV, EncodeCell(scheme, SideKind::kV, x, shape), shape);
    EXPECT_NEAR(RelativeError(x, y), distortion, 0.1 * distortion) << name;
  }
}

TEST(CellCodec, StaticScaleAndMeanAreUndone) {
  const CellShape shape{16, 32};
  auto x = Normal(static_cast<size_t>(16 * 32), 1.0F, 3);
  std::vector<float> mean(32);
  for (size_t i = 0; i < mean.size(); ++i) mean[i] = static_cast<float>(i) * 10.0F;
  for (size_t i = 0; i < x.size(); ++i) x[i] += mean[i % 32];
  const KvScheme scheme = KvScheme::Parse("int4+mean");
  const CellParameters parameters{.mean = mean};
  const auto y =
      DecodeCell(scheme, SideKind::kK, EncodeCell(scheme, SideKind::kK, x, shape, parameters), shape, parameters);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, std::abs(double{x[i]} - y[i]));
  EXPECT_LT(worst, 1.5);  // the mean's 310 would cost tens without being taken out
  const KvScheme fp8 = KvScheme::Parse("fp8");
  EncodeCounts counts;
  const auto big = Normal(static_cast<size_t>(16 * 32), 1e4F, 3);
  const CellParameters scaled{.static_scale = 128.0F};
  const auto decoded =
      DecodeCell(fp8, SideKind::kV, EncodeCell(fp8, SideKind::kV, big, shape, scaled, &counts), shape, scaled);
  EXPECT_EQ(counts.saturated, 0);
  EXPECT_EQ(counts.values, 16 * 32);
  EXPECT_LT(RelativeError(big, decoded), 1e-3);
  EncodeCell(fp8, SideKind::kV, big, shape, {}, &counts);
  EXPECT_GT(counts.saturated, 400);
}

TEST(CellCodec, ThroughExactPageEncodesBf16Rows) {
  const CellShape shape{16, 32};
  const auto x = Normal(static_cast<size_t>(16 * 32), 1.0F, 9);
  auto rounded = x;
  for (float& value : rounded) value = Bf16ToFloat(FloatToBf16(value));
  const KvScheme scheme = KvScheme::Parse("int4-hadamard");
  const CellParameters exact{.through_exact_page = true};
  EXPECT_EQ(EncodeCell(scheme, SideKind::kK, x, shape, exact), EncodeCell(scheme, SideKind::kK, rounded, shape));
  EXPECT_NE(EncodeCell(scheme, SideKind::kK, x, shape, exact), EncodeCell(scheme, SideKind::kK, x, shape));
}

TEST(CellCodec, AnyNumberOfTokensWithZeroPadding) {
  const KvScheme scheme = KvScheme::Parse("int8");
  const auto bytes = EncodeCell(scheme, SideKind::kK, std::vector<float>(24, 1.0F), {3, 8});
  EXPECT_EQ(bytes.size(), 32U + 16U);  // 24 bytes of codes, 6 of scales, each padded
  EXPECT_THAT(std::vector<uint8_t>(bytes.begin() + 24, bytes.begin() + 32), testing::Each(0));
  EXPECT_THAT(std::vector<uint8_t>(bytes.begin() + 38, bytes.end()), testing::Each(0));
}

TEST(CellCodec, WrongSizesAreRefused) {
  const KvScheme int8 = KvScheme::Parse("int8");
  const std::vector<float> x(64);
  EXPECT_THROW(EncodeCell(int8, SideKind::kK, x, {2, 64}), InputError);
  EXPECT_THROW(EncodeCell(int8, SideKind::kK, x, {0, 64}), InputError);
  EXPECT_THROW(EncodeCell(KvScheme::Parse("int4"), SideKind::kK, x, {8, 8}), InputError);
  EXPECT_THROW(EncodeCell(int8, SideKind::kK, x, {1, 64}, {.static_scale = 0.0F}), InputError);
  EXPECT_THROW(EncodeCell(int8, SideKind::kK, x, {1, 64}, {.mean = x}), InputError);
  EXPECT_THROW(DecodeCell(int8, SideKind::kK, std::vector<uint8_t>(79), {1, 64}), InputError);
  EXPECT_THROW(ParseSideKind("q"), InputError);
  EXPECT_EQ(ParseSideKind("v"), SideKind::kV);
}

}  // namespace
}  // namespace kvanta::formats
