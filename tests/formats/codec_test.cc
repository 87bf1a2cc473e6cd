// Exact values of the encoders, from the specification and from IEEE arithmetic.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "formats/all.h"
#include "formats/minifloat.h"
#include "formats/sides.h"

namespace kvanta::formats {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float Scale(const std::vector<uint8_t>& bytes) {
  return Fp16ToFloat(LoadBytes<uint16_t>(bytes.data()));
}

TEST(Minifloat, E4m3ValuesOfTheSpecification) {
  EXPECT_EQ(E4m3::Encode(1.0625F), 0x38);             // tie, to even
  EXPECT_EQ(E4m3::Encode(1.1875F), 0x3A);             // tie, to even
  EXPECT_EQ(E4m3::Encode(464.0F), 0x7E);              // saturated
  EXPECT_EQ(E4m3::Encode(std::ldexp(1.0F, -10)), 0);  // tie below the smallest subnormal
  EXPECT_EQ(E4m3::Encode(std::ldexp(7.5F, -9)), 0x08);
  EXPECT_EQ(E4m3::Encode(448.0F), 0x7E);
  EXPECT_EQ(E4m3::Encode(kInf), 0x7E);
  EXPECT_EQ(E4m3::Encode(-kInf), 0xFE);
  EXPECT_EQ(E4m3::Encode(kNan), 0x7F);
  EXPECT_EQ(E4m3::Encode(-0.0F), 0x80);
  EXPECT_EQ(E4m3::kMax, 448.0F);
}

TEST(Minifloat, E5m2ValuesOfTheSpecification) {
  EXPECT_EQ(E5m2::Encode(1.125F), 0x3C);
  EXPECT_EQ(E5m2::Encode(61440.0F), 0x7B);
  EXPECT_EQ(E5m2::Encode(std::ldexp(1.0F, -17)), 0);
  EXPECT_EQ(E5m2::Encode(kInf), 0x7B);
  EXPECT_EQ(E5m2::Encode(-kInf), 0xFB);
  EXPECT_EQ(E5m2::Encode(kNan), 0x7E);
  EXPECT_EQ(E5m2::kMax, 57344.0F);
  EXPECT_EQ(E5m2::Decode(0x7C), kInf);
  EXPECT_EQ(E5m2::Decode(0xFC), -kInf);
  EXPECT_TRUE(std::isnan(E5m2::Decode(0x7D)));
}

TEST(Minifloat, EveryFiniteCodeRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    if (const float value = E4m3::Decode(byte); std::isfinite(value)) {
      EXPECT_EQ(E4m3::Encode(value), byte);
    }
    if (const float value = E5m2::Decode(byte); std::isfinite(value)) {
      EXPECT_EQ(E5m2::Encode(value), byte);
    }
  }
}

TEST(Fp8, DividesByTheStaticScaleAndCountsSaturation) {
  const Row row = EncodeRow(Find("fp8"), {896.0F, 900.0F, -kInf, kNan, 2.0F, 0, 0, 0}, 2.0F);
  EXPECT_THAT(row.codes, testing::ElementsAre(0x7E, 0x7E, 0xFE, 0x7F, 0x38, 0, 0, 0));
  EXPECT_EQ(row.counts.values, 8);
  EXPECT_EQ(row.counts.saturated, 2);
  EXPECT_EQ(row.counts.nan, 1);
  EXPECT_EQ(row.decoded[0], 896.0F);
}

TEST(Bf16, RoundsToEvenSaturatesAndKeepsNan) {
  const float max = Bf16ToFloat(0x7f7f);
  const float half_even = std::bit_cast<float>(0x3f808000U);
  const float half_odd = std::bit_cast<float>(0x3f818000U);
  const Row row =
      EncodeRow(Find("bf16"), {half_even, half_odd, std::numeric_limits<float>::max(), kInf, -kInf, kNan, max, 0});
  const auto* bits = reinterpret_cast<const uint16_t*>(row.codes.data());
  EXPECT_THAT(std::vector<uint16_t>(bits, bits + 8),
              testing::ElementsAre(0x3f80, 0x3f82, 0x7f7f, 0x7f7f, 0xff7f, 0x7fc0, 0x7f7f, 0));
  EXPECT_EQ(row.counts.saturated, 3);
  EXPECT_EQ(row.counts.nan, 1);
}

TEST(Fp16, SaturatesAboveItsLargest) {
  const Row row = EncodeRow(Find("float16"), {65504.0F, 65505.0F, 1e9F, -kInf, kNan, 6e-8F, 1.0F, -2.0F});
  const auto* bits = reinterpret_cast<const uint16_t*>(row.codes.data());
  EXPECT_THAT(std::vector<uint16_t>(bits, bits + 4), testing::ElementsAre(0x7bff, 0x7bff, 0x7bff, 0xfbff));
  EXPECT_TRUE(std::isnan(row.decoded[4]));
  EXPECT_EQ(bits[5], 1);
  EXPECT_EQ(row.counts.saturated, 3);
  EXPECT_EQ(row.counts.nan, 1);
}

TEST(Int8, ScaleIsRoundedBeforeItIsUsed) {
  const Row row = EncodeRow(Find("int8"), {127.0F, -127.0F, 0.5F, 1.5F, -2.5F, 63.49F, kNan, 0});
  EXPECT_EQ(Scale(row.token_scales), 1.0F);
  EXPECT_THAT(row.codes, testing::ElementsAre(127, 0x81, 0, 2, 0xFE, 63, 0, 0));
  EXPECT_EQ(row.counts.nan, 1);
  EXPECT_EQ(row.counts.saturated, 0);
}

TEST(Int8, ZeroTinyAndHugeRows) {
  const Row zero = EncodeRow(Find("int8"), std::vector<float>(8, 0.0F));
  EXPECT_THAT(zero.codes, testing::Each(0));
  EXPECT_EQ(Scale(zero.token_scales), 0.0F);
  const Row tiny = EncodeRow(Find("int8"), std::vector<float>(8, 1e-9F));  // scale below fp16's smallest
  EXPECT_THAT(tiny.codes, testing::Each(0));
  EXPECT_EQ(Scale(tiny.token_scales), 0.0F);
  const Row huge = EncodeRow(Find("int8"), {kInf, -kInf, 1e30F, 8319008.0F, 1.0F, 0, 0, 0});
  EXPECT_EQ(Scale(huge.token_scales), 65504.0F);
  EXPECT_THAT(huge.codes, testing::ElementsAre(127, 0x81, 127, 127, 0, 0, 0, 0));
  EXPECT_EQ(huge.counts.saturated, 3);
}

TEST(Int4, CodesFromTheSignedMaximumAndLeastSquaresScale) {
  std::vector<float> x(32, 0.0F);
  x[0] = 1.0F;
  x[1] = -8.0F;  // the largest: code -8, d = 1
  x[2] = 8.0F;   // as large, but later: +8 clamps to 7
  x[3] = 2.5F;   // tie, to even
  const Row row = EncodeRow(Find("int4"), x);
  EXPECT_EQ(row.codes[0], 0x09);  // codes 1 and -8: nibbles 9 (low) and 0
  EXPECT_EQ(row.codes[1], 0xAF);  // codes 7 and 2
  EXPECT_EQ(row.codes[2], 0x88);  // zeros
  // sum(xq) / sum(qq) = (1 + 64 + 56 + 5) / (1 + 64 + 49 + 4)
  EXPECT_EQ(LoadBytes<uint16_t>(row.block_scales.data()), FloatToFp16(126.0F / 118.0F));
}

TEST(Int4, ZeroTinyHugeAndNanBlocks) {
  const Row zero = EncodeRow(Find("int4"), std::vector<float>(32, 0.0F));
  EXPECT_THAT(zero.codes, testing::Each(0x88));
  EXPECT_EQ(LoadBytes<uint16_t>(zero.block_scales.data()), 0);
  for (const float x : {1e-45F, -1e-45F, 1e-40F, 1e-8F, -1e-8F}) {
    const Row tiny = EncodeRow(Find("int4"), std::vector<float>(32, x));
    EXPECT_THAT(tiny.codes, testing::Each(0x88)) << x;
    EXPECT_EQ(LoadBytes<uint16_t>(tiny.block_scales.data()), 0) << x;
  }
  std::vector<float> wild(32, 0.0F);
  wild[3] = kInf;
  wild[4] = kNan;
  const Row row = EncodeRow(Find("int4"), wild);
  EXPECT_EQ(row.counts.saturated, 1);
  EXPECT_EQ(row.counts.nan, 1);
  EXPECT_EQ(row.decoded[3], 8.0F * 65504.0F);
  EXPECT_EQ(row.decoded[4], 0.0F);
  wild[4] = -kInf;
  wild[5] = kNan;
  EXPECT_EQ(EncodeRow(Find("int4"), wild).counts.saturated, 2);
  // 524032 fits, but its negative needs code 7, for which the least-squares scale passes 65504.
  std::vector<float> edge(32, 0.0F);
  edge[0] = 524032.0F;
  edge[1] = -524032.0F;
  const Row saturated = EncodeRow(Find("int4"), edge);
  EXPECT_EQ(Scale(saturated.block_scales), -65504.0F);
  EXPECT_EQ(saturated.counts.saturated, 1);
}

}  // namespace
}  // namespace kvanta::formats
