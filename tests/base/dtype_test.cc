#include "base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvanta/error.h"

namespace kvanta {
namespace {

TEST(DType, EveryFp16CodeSurvivesARoundTrip) {
  for (int code = 0; code < 0x10000; ++code) {
    const float value = Fp16ToFloat(static_cast<uint16_t>(code));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Fp16ToFloat(FloatToFp16(value))));
    } else {
      ASSERT_EQ(FloatToFp16(value), code);
    }
  }
}

TEST(DType, Fp16RoundsToNearestEven) {
  EXPECT_EQ(FloatToFp16(1.0F + 0x1p-11F), 0x3c00);      // tie to even
  EXPECT_EQ(FloatToFp16(1.0F + 3 * 0x1p-11F), 0x3c02);  // tie to even, upwards
  EXPECT_EQ(FloatToFp16(0x1p-25F), 0x0000);             // tie with the smallest subnormal
  EXPECT_EQ(FloatToFp16(0x1.000002p-25F), 0x0001);
  EXPECT_EQ(FloatToFp16(65519.996F), 0x7bff);
  EXPECT_EQ(FloatToFp16(65520.0F), 0x7c00);
  EXPECT_EQ(FloatToFp16(-std::numeric_limits<float>::infinity()), 0xfc00);
}

TEST(DType, EveryFp16NeighbourhoodRoundsToTheNearest) {
  for (int code = 0; code < 0x7bff; ++code) {
    const float low = Fp16ToFloat(static_cast<uint16_t>(code));
    const float high = Fp16ToFloat(static_cast<uint16_t>(code + 1));
    const float middle = low + (high - low) / 2;  // exact in f32
    ASSERT_EQ(FloatToFp16(middle), code % 2 == 0 ? code : code + 1);
    ASSERT_EQ(FloatToFp16(std::nextafter(middle, low)), code);
    ASSERT_EQ(FloatToFp16(std::nextafter(middle, high)), code + 1);
  }
}

TEST(DType, Bf16RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(FloatToBf16(1.0F + 0x1p-8F), 0x3f80);
  EXPECT_EQ(FloatToBf16(1.0F + 3 * 0x1p-8F), 0x3f82);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::infinity()), 0x7f80);
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(std::bit_cast<float>(0x7f800001U)))));
  for (int code = 0; code < 0x7f80; ++code) ASSERT_EQ(FloatToBf16(Bf16ToFloat(static_cast<uint16_t>(code))), code);
}

TEST(DType, NamesParse) {
  for (const DType type : {DType::kF32, DType::kBf16, DType::kF16}) EXPECT_EQ(ParseDType(Name(type)), type);
  EXPECT_THROW(ParseDType("int3"), InputError);
}

}  // namespace
}  // namespace kvanta
