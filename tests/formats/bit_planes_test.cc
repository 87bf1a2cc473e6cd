// Codes below 8 bits: the places of fields in their bit planes, and their values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "formats/bit_planes.h"
#include "formats/minifloat.h"

namespace kvanta::formats {
namespace {

// The bit `bit` of the field of channel `channel`, by the sentence in element_type.h: fields of a plane are in units of
// 4 bytes (32 / width channels); field i of byte b belongs to the unit's channel 8 * (i / 2) + 2 * b + i % 2.
struct BitPlace {
  int byte;
  int bit;
};
BitPlace PlaceOf(ElementType code, int head_dim, int channel, int bit) {
  const ElementTypeInfo info = Info(code);
  const bool high = bit >= info.low_bits;
  const int width = high ? info.high_bits : info.low_bits;
  const int section = high ? head_dim * info.low_bits / 8 : 0;
  const int channels = 32 / width;
  for (int b = 0; b < 4; ++b) {
    for (int i = 0; i < 8 / width; ++i) {
      if (8 * (i / 2) + 2 * b + i % 2 != channel % channels) continue;
      return {section + channel / channels * 4 + b, i * width + (high ? bit - info.low_bits : bit)};
    }
  }
  ADD_FAILURE() << "no place for channel " << channel;
  return {};
}

template <ElementType kElementType>
struct CodeConstant {
  static constexpr ElementType kValue = kElementType;
};
template <class T>
class BitPlanes : public testing::Test {};

// Every element type below 8 bits that is stored in planes.
template <int kIndex, class... T>
auto PlaneTypes() {
  if constexpr (kIndex == kElementTypes) {
    return testing::Types<T...>{};
  } else if constexpr (CodeBits(static_cast<ElementType>(kIndex)) < 8 && !IsTrellis(static_cast<ElementType>(kIndex)) &&
                       !IsAllocated(static_cast<ElementType>(kIndex))) {
    return PlaneTypes<kIndex + 1, T..., CodeConstant<static_cast<ElementType>(kIndex)>>();
  } else {
    return PlaneTypes<kIndex + 1, T...>();
  }
}
using PlaneCodes = decltype(PlaneTypes<0>());
TYPED_TEST_SUITE(BitPlanes, PlaneCodes);

TYPED_TEST(BitPlanes, EveryBitIsWhereTheFormulaSays) {
  constexpr ElementType kElementType = TypeParam::kValue;
  std::mt19937 random(4);
  for (const int head_dim : {CodeChannels(kElementType), 96, 1024}) {
    std::vector<uint8_t> fields(static_cast<size_t>(head_dim));
    for (uint8_t& field : fields) field = static_cast<uint8_t>(random() & ((1U << CodeBits(kElementType)) - 1U));
    std::vector<uint8_t> codes(static_cast<size_t>(head_dim * CodeBits(kElementType) / 8) + 1, 0xa5);
    PackFields<kElementType>(fields.data(), head_dim, codes.data());
    EXPECT_EQ(codes.back(), 0xa5);  // nothing past the row
    std::vector<uint8_t> expected(codes.size() - 1, 0);
    for (int channel = 0; channel < head_dim; ++channel) {
      for (int bit = 0; bit < CodeBits(kElementType); ++bit) {
        const BitPlace place = PlaceOf(kElementType, head_dim, channel, bit);
        const unsigned value = (fields[static_cast<size_t>(channel)] >> bit) & 1U;
        uint8_t& byte = expected[static_cast<size_t>(place.byte)];
        byte = static_cast<uint8_t>(byte | (value << place.bit));
      }
    }
    codes.pop_back();
    EXPECT_EQ(codes, expected) << head_dim;
    std::vector<uint8_t> unpacked(fields.size(), 0xff);
    UnpackFields<kElementType>(codes.data(), head_dim, unpacked.data());
    EXPECT_EQ(unpacked, fields) << head_dim;
  }
}

TYPED_TEST(BitPlanes, NoTwoBitsShareAPlace) {
  constexpr ElementType kElementType = TypeParam::kValue;
  constexpr int kHeadDim = 96;
  std::vector<int> hits(kHeadDim * CodeBits(kElementType), 0);
  for (int channel = 0; channel < kHeadDim; ++channel) {
    for (int bit = 0; bit < CodeBits(kElementType); ++bit) {
      const BitPlace place = PlaceOf(kElementType, kHeadDim, channel, bit);
      ++hits[static_cast<size_t>(place.byte * 8 + place.bit)];
    }
  }
  EXPECT_THAT(hits, testing::Each(1));
}

TYPED_TEST(BitPlanes, LevelsAscendAndDecode) {
  constexpr ElementType kElementType = TypeParam::kValue;
  constexpr int kCount = 1 << CodeBits(kElementType);
  constexpr CodeLevels kTable = Levels(kElementType);
  if constexpr (!IsInteger(kElementType)) return;  // floats: golden_test.cc
  for (int i = 1; i < kCount && kElementType != ElementType::kE2M1; ++i)
    EXPECT_LT(kTable.level[i - 1], kTable.level[i]);
  uint8_t fields[64] = {};
  for (int i = 0; i < 64; ++i) fields[i] = static_cast<uint8_t>(i % kCount);
  uint8_t codes[64];
  PackFields<kElementType>(fields, 64, codes);
  float values[64];
  DecodeLevels<kElementType>(codes, 64, values);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(values[i], static_cast<float>(kTable.level[i % kCount]) * kTable.unit) << i;
}

TEST(Codes, DrawnExamples) {
  // Nibbles: low the even channel. Two bits: a byte of channels 0, 1, 8, 9; one bit: of 0, 1, 8, 9, 16, 17, 24, 25.
  uint8_t fields[32] = {};
  fields[1] = 3;
  fields[8] = 2;
  fields[25] = 5;
  uint8_t codes[20];
  PackFields<ElementType::kUint4>(fields, 8, codes);
  EXPECT_THAT(std::vector<uint8_t>(codes, codes + 4), testing::ElementsAre(0x30, 0, 0, 0));
  PackFields<ElementType::kUint2>(fields, 16, codes);
  EXPECT_THAT(std::vector<uint8_t>(codes, codes + 4), testing::ElementsAre(0x2c, 0, 0, 0));
  PackFields<ElementType::kUint3>(fields, 32, codes);
  EXPECT_THAT(std::vector<uint8_t>(codes, codes + 12),
              testing::ElementsAre(0x2c, 0, 0, 0, 0x40, 0, 0, 0, 0x80, 0, 0, 0));
  EXPECT_EQ(CodeChannels(ElementType::kUint3), 32);
  EXPECT_EQ(CodeChannels(ElementType::kInt6), 16);
  EXPECT_EQ(CodeChannels(ElementType::kInt5), 32);
  EXPECT_EQ(CodeChannels(ElementType::kUint2), 16);
  EXPECT_EQ(CodeChannels(ElementType::kE2M1), 8);
  EXPECT_EQ(CodeChannels(ElementType::kBf16), 8);
}

// The levels of a Lloyd-Max quantizer lie at the means of N(0, 1) between the midpoints around them.
TEST(Codes, LloydLevelsAreTheMeansOfTheirIntervals) {
  const auto density = [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * 3.14159265358979323846); };
  const auto below = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  for (const ElementType code : {ElementType::kLloyd4, ElementType::kLloyd3}) {
    const CodeLevels table = Levels(code);
    const int count = 1 << CodeBits(code);
    for (int i = 0; i < count; ++i) {
      const double unit = table.unit;
      const double low = i == 0 ? -40.0 : unit * (table.level[i - 1] + table.level[i]) / 2;
      const double high = i + 1 == count ? 40.0 : unit * (table.level[i] + table.level[i + 1]) / 2;
      const double mean = (density(low) - density(high)) / (below(high) - below(low));
      EXPECT_NEAR(table.level[i] * unit, mean, 0.75 * unit) << i;  // steps of `unit`, neighbours rounded too
    }
    EXPECT_EQ(table.level[count - 1], 127);
  }
}

TEST(E2m1, ValuesOfTheSpecification) {
  EXPECT_EQ(E2m1::Encode(0.25F), 0);  // ties, to even
  EXPECT_EQ(E2m1::Encode(0.75F), 2);
  EXPECT_EQ(E2m1::Encode(2.5F), 4);
  EXPECT_EQ(E2m1::Encode(5.0F), 6);
  EXPECT_EQ(E2m1::Encode(-0.2F), 8);
  EXPECT_EQ(E2m1::Encode(1e30F), 7);
  EXPECT_EQ(E2m1::Encode(-std::numeric_limits<float>::infinity()), 15);
  EXPECT_EQ(E2m1::kMax, 6.0F);
  for (uint8_t code = 0; code < 16; ++code) EXPECT_EQ(E2m1::Encode(E2m1::Decode(code)), code);
}

}  // namespace
}  // namespace kvanta::formats
