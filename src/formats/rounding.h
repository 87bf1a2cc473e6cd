// The pieces that encoders share: magnitudes by bit pattern, clamping with counts, rounding to integers and to fp16.
//
// Everything here is branch-free per element, so that the loops of EncodeRow become vector code at -O3.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "base/dtype.h"
#include "formats/format.h"

namespace kvanta::formats {

inline constexpr float kFp16Max = 65504.0F;
inline constexpr int32_t kInfinityBits = 0x7f800000;

// |x| as bits: orders like |x| for numbers and infinities; NaN is above kInfinityBits.
KVANTA_HD inline int32_t MagnitudeBits(float x) noexcept {
  return std::bit_cast<int32_t>(x) & 0x7fffffff;
}

// x clamped to +-limit; NaN becomes 0.
KVANTA_HD inline float ClampOrZero(float x, float limit) noexcept {
  const float clamped = std::max(-limit, std::min(limit, x));  // NaN: min() gives limit, replaced below
  return MagnitudeBits(x) > kInfinityBits ? 0.0F : clamped;
}

// Counts the row's values, those above `limit` (infinities included) and NaNs. limit: the largest finite value.
KVANTA_HD inline void CountRow(const float* x, int n, float limit, EncodeCounts& counts) noexcept {
  const int32_t limit_bits = std::bit_cast<int32_t>(limit);
  int32_t above = 0;  // NaNs included
  int32_t nan = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t bits = MagnitudeBits(x[i]);
    above += bits > limit_bits ? 1 : 0;
    nan += bits > kInfinityBits ? 1 : 0;
  }
  counts.values += n;
  counts.saturated += above - nan;
  counts.nan += nan;
}

// Round to nearest even for |x| < 2^22: the sum has no fraction bits left. Cheaper than nearbyint, same result.
KVANTA_HD inline int32_t RoundToInt(float x) noexcept {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23
  return std::bit_cast<int32_t>(x + kMagic) - std::bit_cast<int32_t>(kMagic);
}

// Nearest fp16, +-65504 where that would be infinite, +0 where it would be zero.
KVANTA_HD inline uint16_t RoundScale(float scale, bool& saturated) noexcept {
  const uint16_t bits = FloatToFp16(scale);
  saturated = (bits & 0x7fffU) >= 0x7c00U;
  if (saturated) return static_cast<uint16_t>((bits & 0x8000U) | 0x7bffU);
  return (bits & 0x7fffU) == 0 ? uint16_t{0} : bits;
}

}  // namespace kvanta::formats
