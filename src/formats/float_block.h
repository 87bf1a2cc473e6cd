// Base of the formats of floats below 8 bits in blocks, each with a one-byte scale.
//
//   code = float(x / (s_head s)),   x_hat = value(code) * s * s_head
//
// NaN becomes 0 and is counted: these floats have none.
#pragma once

#include "formats/bit_planes.h"
#include "formats/bytes.h"
#include "formats/format_traits.h"
#include "formats/minifloat.h"
#include "formats/rounding.h"

namespace kvanta::formats {

// Writes the fields of a block under `scale`; zeros if that is 0.
template <class Float>
KVANTA_HD void EncodeFields(const float* x, int n, float scale, uint8_t* fields) noexcept {
  for (int i = 0; i < n; ++i) fields[i] = scale == 0.0F ? uint8_t{0} : Float::Encode(x[i] / scale);
}

// `Rule`: kElementType, kBlock, kMax (the largest value that does not saturate), kScaleType, kPerHead, and
// Encode(x [kBlock] clamped to kMax, amax, fields [kBlock]) -> scale byte.
template <class Rule>
struct FloatBlock : FormatTraits {
  static constexpr ElementType kElementType = Rule::kElementType;
  static constexpr int kBlock = Rule::kBlock;
  static constexpr ExactPages kExact = ExactPages::kOpen;
  static constexpr int kSinkPages = 1;
  static constexpr Scaling kScaling = {.per_head = Rule::kPerHead, .block = Rule::kScaleType, .channels = Rule::kBlock};

  KVANTA_HD static void EncodeRow(const float* x, int head_dim, HeadParameters head, RowSections out,
                                  EncodeCounts& counts) noexcept {
    uint8_t fields[kLongestRow];
    float scaled[kBlock];
    for (int begin = 0; begin < head_dim; begin += kBlock) {
      for (int i = 0; i < kBlock; ++i) scaled[i] = Rule::kPerHead ? x[begin + i] / head.static_scale : x[begin + i];
      CountRow(scaled, kBlock, Rule::kMax, counts);
      int32_t magnitude = 0;
      for (float& value : scaled) {
        value = ClampOrZero(value, Rule::kMax);
        magnitude = std::max(magnitude, MagnitudeBits(value));
      }
      out.block_scales[begin / kBlock] = Rule::Encode(scaled, std::bit_cast<float>(magnitude), fields + begin);
    }
    PackFields<kElementType>(fields, head_dim, out.codes);
  }

  static void DecodeRow(ConstRowSections in, int head_dim, HeadParameters head, float* x) noexcept {
    DecodeLevels<kElementType>(in.codes, head_dim, x);
    for (int i = 0; i < head_dim; ++i) {
      const uint8_t byte = in.block_scales[i / kBlock];
      x[i] *= Rule::kScaleType == ScaleType::kE4M3 ? E4m3::Decode(byte) : E8m0::Decode(byte);
      if (Rule::kPerHead) x[i] *= head.static_scale;
    }
  }
};

// E8M0 scales: the byte of 2^exponent, clamped to what it holds.
KVANTA_HD inline uint8_t ExponentByte(int exponent) noexcept {
  return static_cast<uint8_t>(std::max(0, std::min(254, exponent + 127)));
}
// floor(log2 x) by the bits of x > 0; below f32's normal numbers -127.
KVANTA_HD inline int FloorLog2(float x) noexcept {
  return (MagnitudeBits(x) >> 23) - 127;
}

}  // namespace kvanta::formats
