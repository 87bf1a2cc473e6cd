// Small floats of at most a byte, by their bit fields: sign | exponent | mantissa (OCP 8-bit Floating Point
// Specification, revision 1.0, and Microscaling Formats, revision 1.0; e4m3 is the variant without infinities, also
// called E4M3FN).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "formats/rounding.h"

namespace kvanta::formats {

template <int kExponentBits, int kMantissaBits, uint8_t kMaxCode, uint8_t kNanCode>
struct Minifloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kSignBit = kExponentBits + kMantissaBits;
  static constexpr int kDropped = 23 - kMantissaBits;  // mantissa bits that f32 has and this lacks

  KVANTA_HD static constexpr float Decode(uint8_t code) noexcept {
    const uint32_t sign = static_cast<uint32_t>(code >> kSignBit) << 31U;
    const uint32_t magnitude = code & ((1U << kSignBit) - 1U);
    if (magnitude > kMaxCode) {
      const bool infinite = kNanCode != kMaxCode + 1 && magnitude == kMaxCode + 1U;
      return std::bit_cast<float>(sign | (infinite ? 0x7f800000U : 0x7fc00000U));
    }
    // As an f32 with the exponent field unshifted this is the value times 2^(bias - 127); a subnormal stays one, and
    // the multiplication (exact) normalizes it.
    const float scaled = std::bit_cast<float>(sign | (magnitude << kDropped));
    return scaled * std::bit_cast<float>(static_cast<uint32_t>(254 - kBias) << 23U);
  }

  static constexpr float kMax = Decode(kMaxCode);

  // Nearest even; |x| above kMax gives +-kMax; NaN gives the NaN code with x's sign.
  KVANTA_HD static uint8_t Encode(float x) noexcept {
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 31U) << kSignBit;
    const uint32_t magnitude = bits & 0x7fffffffU;
    constexpr auto kMaxBits = std::bit_cast<uint32_t>(kMax);
    const uint32_t clamped = std::min(magnitude, kMaxBits);

    // Normal numbers: round the mantissa by integer arithmetic, then move the exponent's bias.
    constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23U;
    const uint32_t odd = (clamped >> kDropped) & 1U;
    const uint32_t normal = (clamped - kRebias + ((1U << (kDropped - 1)) - 1U) + odd) >> kDropped;
    // Subnormal ones: adding 2^(23 + exponent of the last bit) leaves the code in the low bits, rounded by the adder.
    constexpr auto kMagic = static_cast<uint32_t>(127 - kBias + 1 + kDropped) << 23U;
    const float sum = std::bit_cast<float>(clamped) + std::bit_cast<float>(kMagic);
    const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - kMagic;

    constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 - kBias + 1) << 23U;
    const uint32_t finite = clamped < kMinNormal ? subnormal : normal;
    return static_cast<uint8_t>(sign | (magnitude > 0x7f800000U ? kNanCode : finite));
  }
};

using E4m3 = Minifloat<4, 3, 0x7e, 0x7f>;  // largest 448, no infinities
using E5m2 = Minifloat<5, 2, 0x7b, 0x7e>;  // largest 57344; 0x7c is infinity, never written
using E3m2 = Minifloat<3, 2, 0x1f, 0x0>;   // largest 28, neither infinities nor NaN: 6 bits
using E2m1 = Minifloat<2, 1, 0x7, 0x0>;    // largest 6, neither infinities nor NaN: 4 bits

// A power of two: 2^(byte - 127). 255, NaN, is never written.
struct E8m0 {
  KVANTA_HD static constexpr float Decode(uint8_t byte) noexcept {
    if (byte == 255) return std::bit_cast<float>(0x7fc00000U);
    return std::bit_cast<float>(byte == 0 ? 0x00400000U : uint32_t{byte} << 23U);
  }
};

// Rows of formats whose code is a minifloat under a static scale: stored value = x / scale.
template <class Float>
KVANTA_HD void EncodeMinifloatRow(const float* x, int head_dim, float scale, uint8_t* __restrict codes,
                                  EncodeCounts& counts) noexcept {
  constexpr int kChunk = 64;
  float scaled[kChunk];
  for (int begin = 0; begin < head_dim; begin += kChunk) {
    const int n = std::min(kChunk, head_dim - begin);
    for (int i = 0; i < n; ++i) scaled[i] = x[begin + i] / scale;
    CountRow(scaled, n, Float::kMax, counts);
    for (int i = 0; i < n; ++i) codes[begin + i] = Float::Encode(scaled[i]);
  }
}

// A run of values under a scale of its own, amax / the largest code, which is returned. A scale of zero (of zeros, or
// of the least subnormals) has zero codes. NaN stays NaN.
template <class Float>
KVANTA_HD float EncodeMinifloatRun(const float* x, int n, uint8_t* codes, EncodeCounts& counts) noexcept {
  constexpr float kLimit = std::numeric_limits<float>::max();
  CountRow(x, n, kLimit, counts);
  int32_t magnitude = 0;
  for (int i = 0; i < n; ++i) magnitude = std::max(magnitude, MagnitudeBits(ClampOrZero(x[i], kLimit)));
  const float scale = std::bit_cast<float>(magnitude) / Float::kMax;
  const float divisor = scale == 0.0F ? std::numeric_limits<float>::infinity() : scale;
  for (int i = 0; i < n; ++i) {
    const float value = MagnitudeBits(x[i]) > kInfinityBits ? x[i] : ClampOrZero(x[i], kLimit);
    codes[i] = Float::Encode(value / divisor);
  }
  return scale;
}

template <class Float>
KVANTA_HD void DecodeMinifloatRow(const uint8_t* codes, int head_dim, float scale, float* x) noexcept {
  for (int i = 0; i < head_dim; ++i) x[i] = Float::Decode(codes[i]) * scale;
}

}  // namespace kvanta::formats
