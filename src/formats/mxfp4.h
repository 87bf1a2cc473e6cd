// mxfp4: E2M1 in blocks of 32 channels with a power of two as scale (OCP Microscaling Formats, revision 1.0).
// fp4_e2m1: blocks of 16, and the power of two rounded up, so that no value is clipped (SGLang's fp4_mx_block16).
#pragma once

#include "formats/float_block.h"

namespace kvanta::formats {

struct MxRule {
  static constexpr ElementType kElementType = ElementType::kE2M1;
  static constexpr bool kPerHead = false;
  static constexpr ScaleType kScaleType = ScaleType::kE8M0;
  static constexpr float kMax = E2m1::kMax * 0x1p125F;  // with the next scale, a code of 4 or 6 would not fit f32
};

struct Mxfp4Rule : MxRule {
  static constexpr int kBlock = 32;

  // floor(log2 amax) - 2: the block's largest value is in [4, 8) scales, and values above 6 are clipped.
  KVANTA_HD static uint8_t Encode(const float* x, float amax, uint8_t* fields) noexcept {
    const uint8_t scale = amax == 0.0F ? uint8_t{0} : ExponentByte(FloorLog2(amax) - 2);
    EncodeFields<E2m1>(x, kBlock, E8m0::Decode(scale), fields);
    return scale;
  }
};

struct Fp4CeilRule : MxRule {
  static constexpr int kBlock = 16;

  // ceil(log2(amax / 6)): the largest value is in (3, 6] scales. By the bits, because a quotient would be rounded.
  KVANTA_HD static uint8_t Encode(const float* x, float amax, uint8_t* fields) noexcept {
    const bool above_six = (MagnitudeBits(amax) & 0x7fffff) > 0x400000;  // 6 = 1.5 * 2^2
    const uint8_t scale = amax == 0.0F ? uint8_t{0} : ExponentByte(FloorLog2(amax) - 2 + (above_six ? 1 : 0));
    EncodeFields<E2m1>(x, kBlock, E8m0::Decode(scale), fields);
    return scale;
  }
};

struct Mxfp4 : FloatBlock<Mxfp4Rule> {
  static constexpr std::string_view kName = "mxfp4";
  static constexpr std::string_view kSummary =
      "4-bit float E2M1, power-of-two scale per 32 channels (OCP); open and first page exact";
  static constexpr std::string_view kRule = "s = 2^(floor(log2(amax)) - 2) of 32 channels; code = e2m1(x / s)";
};

struct Fp4E2m1 : FloatBlock<Fp4CeilRule> {
  static constexpr std::string_view kName = "fp4_e2m1";
  static constexpr std::string_view kLatentFormat = "mla_nvfp4";
  static constexpr std::array<std::string_view, 1> kAliases = {"fp4_mx_block16"};
  static constexpr std::string_view kSummary =
      "4-bit float E2M1, power-of-two scale per 16 channels, rounded up (SGLang's); open and first page exact";
  static constexpr std::string_view kRule = "s = 2^ceil(log2(amax / 6)) of 16 channels; code = e2m1(x / s)";
};

}  // namespace kvanta::formats
