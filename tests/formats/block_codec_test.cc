// Exact values of the encoders with scales per block, per row with an offset, per channel of a token group, and of
// Lloyd-Max levels: worked out by hand from docs/formats.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "base/dtype.h"
#include "formats/all.h"
#include "formats/sides.h"

namespace kvanta::formats {
namespace {

using testing::Each;
using testing::ElementsAre;

constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

float Fp16At(const std::vector<uint8_t>& section, size_t index = 0) {
  return Fp16ToFloat(LoadBytes<uint16_t>(section.data() + 2 * index));
}

// A block whose first values are given, the others 0.
std::vector<float> Block(std::vector<float> values, size_t size = 32) {
  values.resize(size, 0.0F);
  return values;
}

template <ElementType kElementType>
std::vector<int> Fields(const Row& row, size_t shown) {
  const auto head_dim = static_cast<int>(row.decoded.size());
  std::vector<uint8_t> fields(row.decoded.size());
  UnpackFields<kElementType>(row.codes.data(), head_dim, fields.data());
  return {fields.begin(), fields.begin() + static_cast<std::ptrdiff_t>(shown)};
}

template <ElementType kElementType>
void CheckSignedBlock(const char* name) {
  constexpr int kHalf = 1 << (CodeBits(kElementType) - 1);
  constexpr auto kTop = static_cast<float>(kHalf);
  const Row row = EncodeRow(Find(name), Block({1.0F, -kTop, kTop, 0.5F}));
  // d = 1 from the second; the third, as large, comes later and is clamped; the fourth is a tie, to even.
  EXPECT_THAT(Fields<kElementType>(row, 5), ElementsAre(kHalf + 1, 0, 2 * kHalf - 1, kHalf, kHalf)) << name;
  const float xq = 1 + kTop * kTop + kTop * (kTop - 1);
  const float qq = 1 + kTop * kTop + (kTop - 1) * (kTop - 1);
  EXPECT_EQ(Fp16At(row.block_scales), Fp16ToFloat(FloatToFp16(xq / qq))) << name;
  EXPECT_EQ(row.decoded[1], -kTop * Fp16At(row.block_scales)) << name;
  EXPECT_EQ(row.counts.saturated, 0) << name;

  const Row zero = EncodeRow(Find(name), Block({1e-9F, -1e-9F}));  // d below fp16's least
  EXPECT_EQ(LoadBytes<uint16_t>(zero.block_scales.data()), 0) << name;
  EXPECT_THAT(Fields<kElementType>(zero, 32), Each(kHalf)) << name;
  const Row wild = EncodeRow(Find(name), Block({0, kInfinite, kNotANumber}));
  EXPECT_EQ(wild.decoded[1], kTop * 65504.0F) << name;
  EXPECT_EQ(wild.counts.saturated + 10 * wild.counts.nan, 11) << name;
}

TEST(SignedBlocks, CodesFromTheSignedMaximumAndLeastSquaresScale) {
  CheckSignedBlock<ElementType::kInt6>("int6_g32");
  CheckSignedBlock<ElementType::kInt5>("int5_g32");
  CheckSignedBlock<ElementType::kInt4>("int4");
  CheckSignedBlock<ElementType::kInt3>("int3_g32");
  CheckSignedBlock<ElementType::kInt2>("int2_g32");
}

TEST(Int8Blocks, EachHasItsScale) {
  auto x = Block({127.0F, -1.5F, 63.5F}, 64);
  x[32] = -254.0F;
  x[33] = 3.0F;  // 1.5 steps
  const Row row = EncodeRow(Find("int8_g32"), x);
  EXPECT_EQ(Fp16At(row.block_scales, 0), 1.0F);
  EXPECT_EQ(Fp16At(row.block_scales, 1), 2.0F);
  EXPECT_THAT(std::vector<uint8_t>(row.codes.begin(), row.codes.begin() + 3), ElementsAre(127, 0xfe, 64));
  EXPECT_THAT(std::vector<uint8_t>(row.codes.begin() + 32, row.codes.begin() + 34), ElementsAre(0x81, 2));
}

TEST(Fp8PerTokenHead, ScaleIsThatOfTheRow) {
  const Row row = EncodeRow(Find("fp8_per_token_head"), Block({896.0F, -2.0F, 2.125F, kNotANumber}, 8));
  EXPECT_EQ(LoadBytes<float>(row.token_scales.data()), 2.0F);
  EXPECT_THAT(row.codes, ElementsAre(0x7e, 0xb8, 0x38, 0x7f, 0, 0, 0, 0));
  EXPECT_EQ(row.counts.nan, 1);
  const Row wild = EncodeRow(Find("fp8_per_token_head"), Block({kInfinite, -kInfinite, kLargest, 1.0F}, 8));
  EXPECT_EQ(wild.counts.saturated, 2);
  EXPECT_EQ(wild.decoded[0], kLargest);
  EXPECT_EQ(wild.decoded[1], -kLargest);
  EXPECT_EQ(wild.decoded[3], 0.0F);
  EXPECT_THAT(EncodeRow(Find("fp8_per_token_head"), Block({1e-45F, 0.0F}, 8)).codes, Each(0));
}

struct PowerCase {
  const char* format;
  float amax;
  uint8_t scale;
  uint8_t code;  // code of the largest value
};

TEST(PowerOfTwoScales, ExponentsOfTheLargestValue) {
  for (const PowerCase& test : std::vector<PowerCase>{{"mxfp8", 448.0F, 127, 0x7e},  // in [256, 512) scales
                                                      {"mxfp8", 500.0F, 127, 0x7e},  // clipped: the price of this rule
                                                      {"mxfp8", 512.0F, 128, 0x78},  // 256
                                                      {"mxfp4", 6.0F, 127, 7},       // in [4, 8) scales
                                                      {"mxfp4", 7.9F, 127, 7},       // clipped
                                                      {"mxfp4", 8.0F, 128, 6},       //
                                                      {"mxfp4", 3.9F, 126, 7},       // 7.8 scales
                                                      {"fp4_e2m1", 6.0F, 127, 7},    // in (3, 6] scales
                                                      {"fp4_e2m1", 6.0000005F, 128, 5},  // 3 scales: nothing is clipped
                                                      {"fp4_e2m1", 3.0F, 126, 7},        //
                                                      {"fp4_e2m1", 4.0F, 127, 6},        //
                                                      {"fp4_e2m1", 0x1.8p-125F, 0, 7},   // 6 * 2^-127
                                                      {"fp4_e2m1", 0x1.800002p-125F, 1, 5},
                                                      {"fp4_e2m1", 1e-40F, 0, 0},  // the least scale
                                                      {"mxfp4", 1e-40F, 0, 0},
                                                      {"mxfp8", 0x1p-127F, 0, 0x38},
                                                      {"mxfp8", 0.0F, 0, 0}}) {
    const Row row = EncodeRow(Find(test.format), Block({test.amax}));
    EXPECT_EQ(row.block_scales[0], test.scale) << test.format << " " << test.amax;
    EXPECT_EQ(row.codes[0], test.code) << test.format << " " << test.amax;
    EXPECT_EQ(row.counts.saturated, 0) << test.format << " " << test.amax;
  }
}

TEST(PowerOfTwoScales, TheLargestValuesDecodeToNumbers) {
  for (const auto& [format, largest] :
       {std::pair{"mxfp8", 448 * 0x1p119F}, {"mxfp4", 6 * 0x1p125F}, {"fp4_e2m1", 6 * 0x1p125F}}) {
    for (const float x : {kInfinite, kLargest, std::nextafter(largest, kInfinite), largest}) {
      const Row row = EncodeRow(Find(format), Block({x, -x}));
      EXPECT_EQ(row.decoded[0], largest) << format << " " << x;
      EXPECT_EQ(row.decoded[1], -largest) << format << " " << x;
      EXPECT_EQ(row.counts.saturated, x > largest ? 2 : 0) << format << " " << x;
    }
  }
}

TEST(Nvfp4, ScalesOfBlocksUnderTheScaleOfTheHead) {
  const std::vector<float> x = Block({6.0F, -3.0F, 0.5F, 0.25F, 5.0F, kNotANumber}, 16);
  const Row row = EncodeRow(Find("nvfp4"), x);
  EXPECT_EQ(row.block_scales[0], 0x38);  // 1
  EXPECT_THAT(Fields<ElementType::kE2M1>(row, 7), ElementsAre(7, 13, 1, 0, 6, 0, 0));
  EXPECT_EQ(row.counts.nan, 1);
  auto doubled = x;
  for (float& value : doubled) value *= 2;
  const Row scaled = EncodeRow(Find("nvfp4"), doubled, 2.0F);
  EXPECT_EQ(scaled.codes, row.codes);
  EXPECT_EQ(scaled.decoded[0], 12.0F);
  const Row wild = EncodeRow(Find("nvfp4"), Block({2688.0F, 2690.0F, -kInfinite}, 16));
  EXPECT_EQ(wild.block_scales[0], 0x7e);
  EXPECT_EQ(wild.decoded[2], -2688.0F);
  EXPECT_EQ(wild.counts.saturated, 2);
  // Half the least E4M3 and below: no scale, no codes.
  EXPECT_THAT(EncodeRow(Find("nvfp4"), Block({6 * 0x1p-10F, -6 * 0x1p-10F}, 16)).codes, Each(0));
}

TEST(FourOverSix, TakesWhatErrsLessAndSixWhereBothErrAlike) {
  const Row four = EncodeRow(Find("nvfp4_4over6"), Block({4.0F, 3.0F, 2.0F, 1.0F, 0.5F}, 16));
  EXPECT_EQ(four.block_scales[0], 0x38);  // exact at scale 1; 4 / 6 is none of E4M3's
  EXPECT_EQ(four.decoded[0], 4.0F);
  EXPECT_EQ(EncodeRow(Find("nvfp4"), Block({4.0F, 3.0F, 2.0F, 1.0F, 0.5F}, 16)).block_scales[0], 0x33);  // 0.6875
  const Row six = EncodeRow(Find("nvfp4_4over6"), Block({6.0F, 3.0F, 1.5F}, 16));  // exact at 1 and at 1.5
  EXPECT_EQ(six.block_scales[0], 0x38);
  EXPECT_EQ(EncodeRow(Find("nvfp4_4over6"), Block({0.0F}, 16)).block_scales[0], 0);
}

TEST(UnsignedRows, StepsFromTheLeastToTheGreatest) {
  const Format& format = Find("int4_per_token_head");
  const Row row = EncodeRow(format, {-8.0F, 7.0F, -7.5F, -6.5F, 0.0F, kNotANumber, 6.6F, -8.0F});
  EXPECT_EQ(Fp16At(row.token_scales), 1.0F);
  EXPECT_EQ(Fp16At(row.token_offsets), -8.0F);
  EXPECT_THAT(Fields<ElementType::kUint4>(row, 8), ElementsAre(0, 15, 0, 2, 8, 8, 15, 0));
  EXPECT_EQ(row.decoded[3], -6.0F);
  EXPECT_EQ(row.counts.nan, 1);
  // A constant is its zero; a NaN takes part as 0.
  const Row constant = EncodeRow(format, std::vector<float>(8, 3.3F));
  EXPECT_EQ(LoadBytes<uint16_t>(constant.token_scales.data()), 0);
  EXPECT_THAT(constant.codes, Each(0));
  EXPECT_THAT(constant.decoded, Each(Fp16ToFloat(FloatToFp16(3.3F))));
  const Row negative_zero = EncodeRow(format, std::vector<float>(8, -0.0F));
  EXPECT_EQ(LoadBytes<uint16_t>(negative_zero.token_offsets.data()), 0);
  const Row wild = EncodeRow(format, {kInfinite, -kInfinite, 65505.0F, 65504.0F, 0, 0, 0, 0});
  EXPECT_EQ(wild.counts.saturated, 3);
  EXPECT_EQ(Fp16At(wild.token_offsets), -65504.0F);
  EXPECT_THAT(wild.decoded, Each(testing::Truly([](float x) { return std::isfinite(x); })));
}

TEST(UnsignedBlocks, ValuesOfKiviHaveAScaleAndAZeroPer32Channels) {
  std::vector<float> x(64);
  for (size_t i = 0; i < 64; ++i) x[i] = i < 32 ? static_cast<float>(i % 4) : 100.0F + 2 * static_cast<float>(i % 4);
  const Row row = EncodeRow(OnSide(Find("kivi2"), false), x);
  EXPECT_EQ(Fp16At(row.block_scales, 0), 1.0F);
  EXPECT_EQ(Fp16At(row.block_offsets, 0), 0.0F);
  EXPECT_EQ(Fp16At(row.block_scales, 1), 2.0F);
  EXPECT_EQ(Fp16At(row.block_offsets, 1), 100.0F);
  EXPECT_THAT(Fields<ElementType::kUint2>(row, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_EQ(row.decoded, x);
}

TEST(UnsignedTokenGroups, OffsetsOfKiviKeysHoldTheChannelsBias) {
  constexpr size_t kHeadDim = 16;
  std::vector<float> x(32 * kHeadDim);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = 128.0F * static_cast<float>(i % kHeadDim) + static_cast<float>(i / kHeadDim % 16);
  }
  x[3 * kHeadDim + 5] = kNotANumber;
  const Row row = EncodeRow(Find("kivi4"), x);
  for (size_t channel = 0; channel < kHeadDim; ++channel) {
    if (channel == 5) continue;
    EXPECT_EQ(Fp16At(row.channel_scales, channel), 1.0F) << channel;
    EXPECT_EQ(Fp16At(row.channel_offsets, channel), 128.0F * static_cast<float>(channel));
    EXPECT_EQ(row.decoded[7 * kHeadDim + channel], x[7 * kHeadDim + channel]);
  }
  EXPECT_EQ(Fp16At(row.channel_offsets, 5), 0.0F);  // NaN takes part as 0
  EXPECT_EQ(row.counts.nan, 1);
  EXPECT_EQ(row.counts.values, 32 * 16);
}

TEST(LloydRows, NearestLevelsAndTheNormOfTheRow) {
  const Format& format = Find("turboquant_4bit_nc");
  // Values of one magnitude lie at 1 / unit = 46.5 steps of it; the nearest level is 44.
  const Row flat = EncodeRow(format, {3, -3, 3, -3, 3, -3, 3, -3});
  EXPECT_THAT(Fields<ElementType::kLloyd4>(flat, 2), ElementsAre(11, 4));
  EXPECT_EQ(Fp16At(flat.token_scales), Fp16ToFloat(FloatToFp16(3.0F * 127.0F / (44.0F * 2.7326F))));
  EXPECT_NEAR(flat.decoded[0], 3.0F, 3 * 0x1p-11F);
  std::mt19937 random(12);
  std::normal_distribution<float> normal(0.0F, 5.0F);
  for (const char* name : {"turboquant_4bit_nc", "turboquant_3bit_nc"}) {
    std::vector<float> x(128);
    for (float& value : x) value = normal(random);
    const Row row = EncodeRow(Find(name), x);
    double before = 0;
    double after = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      before += double{x[i]} * x[i];
      after += double{row.decoded[i]} * row.decoded[i];
    }
    EXPECT_NEAR(std::sqrt(after / before), 1.0, 0x1p-11 + 1e-6) << name;  // fp16's rounding of the scale
  }
}

TEST(LloydRows, ZeroTinyAndHugeRows) {
  // The lower of the two levels next to 0.
  EXPECT_THAT(EncodeRow(Find("turboquant_4bit_nc"), std::vector<float>(8, 0.0F)).codes, Each(0x77));
  EXPECT_THAT(Fields<ElementType::kLloyd3>(EncodeRow(Find("turboquant_k3v4_nc"), Block({})), 32), Each(3));
  for (const char* name : {"turboquant_4bit_nc", "turboquant_k3v4_nc"}) {
    const Row zero = EncodeRow(Find(name), std::vector<float>(32, 0.0F));
    EXPECT_EQ(LoadBytes<uint16_t>(zero.token_scales.data()), 0);
    EXPECT_THAT(zero.decoded, Each(0.0F));
    for (const float x : {1e-9F, -1e-45F}) {
      const Row tiny = EncodeRow(Find(name), std::vector<float>(32, x));
      EXPECT_EQ(tiny.codes, zero.codes) << x;  // no scale, so no codes
      EXPECT_EQ(tiny.token_scales, zero.token_scales) << x;
    }
    // Every value fits, but the scale that gives the row its norm does not.
    const Row huge = EncodeRow(Find(name), std::vector<float>(32, 65504.0F));
    EXPECT_EQ(Fp16At(huge.token_scales), 65504.0F);
    EXPECT_EQ(huge.counts.saturated, 1);
    const Row wild = EncodeRow(Find(name), Block({kInfinite, kNotANumber, 70000.0F}));
    EXPECT_EQ(wild.counts.saturated, 2);
    EXPECT_EQ(wild.counts.nan, 1);
    EXPECT_TRUE(std::isfinite(wild.decoded[0]));
  }
}

TEST(Sides, TurboquantsAreOtherFormatsByOtherNames) {
  std::vector<float> x(32);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  EXPECT_EQ(EncodeRow(Find("turboquant_k8v4"), x, 0.5F).codes, EncodeRow(Find("fp8"), x, 0.5F).codes);
  const auto values = [&](const char* name) { return EncodeRow(OnSide(Find(name), false), x); };
  EXPECT_EQ(values("turboquant_k8v4").codes, EncodeRow(Find("int4_per_token_head"), x).codes);
  EXPECT_EQ(values("turboquant_4bit_nc").codes, values("turboquant_k3v4_nc").codes);
  EXPECT_NE(values("turboquant_4bit_nc").codes, values("turboquant_3bit_nc").codes);
  EXPECT_EQ(EncodeRow(Find("turboquant_k3v4_nc"), x).codes, EncodeRow(Find("turboquant_3bit_nc"), x).codes);
}

}  // namespace
}  // namespace kvanta::formats
