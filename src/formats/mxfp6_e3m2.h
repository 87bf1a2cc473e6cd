// mxfp6_e3m2: E3M2 in blocks of 32 channels with a power of two as scale (OCP Microscaling Formats, revision 1.0).
#pragma once

#include "formats/float_block.h"

namespace kvanta::formats {

struct Mxfp6E3m2Rule {
  static constexpr ElementType kElementType = ElementType::kE3M2;
  static constexpr int kBlock = 32;
  static constexpr bool kPerHead = false;
  static constexpr ScaleType kScaleType = ScaleType::kE8M0;
  static constexpr float kMax = E3m2::kMax * 0x1p123F;  // with the next scale, codes of 16 and more would not fit f32

  // floor(log2 amax) - 4: the block's largest value is in [16, 32) scales, and values above 28 are clipped.
  KVANTA_HD static uint8_t Encode(const float* x, float amax, uint8_t* fields) noexcept {
    const uint8_t scale = amax == 0.0F ? uint8_t{0} : ExponentByte(FloorLog2(amax) - 4);
    EncodeFields<E3m2>(x, kBlock, E8m0::Decode(scale), fields);
    return scale;
  }
};

struct Mxfp6E3m2 : FloatBlock<Mxfp6E3m2Rule> {
  static constexpr std::string_view kName = "mxfp6_e3m2";
  static constexpr std::array<std::string_view, 1> kAliases = {"fp6_e3m2"};
  static constexpr std::string_view kSummary =
      "6-bit float E3M2, power-of-two scale per 32 channels (OCP); open page exact";
  static constexpr std::string_view kRule = "s = 2^(floor(log2(amax)) - 4) of 32 channels; code = e3m2(x / s)";
  static constexpr int kSinkPages = 0;
};

}  // namespace kvanta::formats
