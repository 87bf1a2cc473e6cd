// The codes of the cache in compiler vectors, for any CPU. What Dot() computes is described in codes_avx2.h; here a
// coefficient is an f32 or an int32 in natural order.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/lanes_portable.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kQueryTile = 2;

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Lanes::F KeepOr(Lanes::F x, float other, int begin, int end) {
  constexpr Lanes::I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Lanes::F others = Lanes::Set1(other);
  return ((lane >= begin) & (lane < end)) ? x : others;
}

template <bool kHalf>
KVANTA_INLINE Lanes::U LoadUnits(const uint8_t* bytes) {
  Lanes::U units{};
  std::memcpy(&units, bytes, kHalf ? 32 : 64);
  return units;
}

template <class Decode>
struct FloatCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { std::memcpy(out, &x, sizeof x); }

  template <int kRows, bool kHalf>
  static KVANTA_INLINE void Dot(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                const int32_t* /*bias*/, Lanes::F* sums, Prefetcher& prefetch) {
    for (int r = 0; r < kRows; ++r) sums[r] = Lanes::Zero();
    for (int64_t i = 0; i < count; ++i) {
      prefetch.Step();
      const Lanes::U units = LoadUnits<kHalf>(lines + i * stride);
      for (int s = 0; s < kSub; ++s) {
        const Lanes::F x = Decode::Element(units, s);
        for (int r = 0; r < kRows; ++r) {
          float c;
          std::memcpy(&c, coefficients[r] + (i * kSub + s) * 4, 4);
          sums[r] = Lanes::Fma(x, Lanes::Set1(c), sums[r]);
        }
      }
    }
  }
};

struct DecodeFp32 {
  static constexpr int kSub = 1;
  static KVANTA_INLINE Lanes::F Element(Lanes::U units, int) { return (Lanes::F)units; }
};
struct DecodeBf16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE Lanes::F Element(Lanes::U units, int s) { return (Lanes::F)((units >> (16 * s)) << 16); }
};
// An fp16 in the low half of each lane: shifted into place and multiplied by 2^112, which is exact, subnormals
// included; then infinities and NaN get their exponent.
KVANTA_INLINE Lanes::F FromFp16(Lanes::U bits) {
  const Lanes::U magnitude = (bits & 0x7fffU) << 13;
  const Lanes::U special = (Lanes::U)(magnitude >= 0x0f800000U) & 0x7f800000U;
  return (Lanes::F)((Lanes::U)((Lanes::F)magnitude * Lanes::Set1(0x1p112f)) | special | ((bits & 0x8000U) << 16));
}
struct DecodeFp16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE Lanes::F Element(Lanes::U units, int s) { return FromFp16((units >> (16 * s)) & 0xffffU); }
};
struct DecodeE4M3 {
  static constexpr int kSub = 4;
  static KVANTA_INLINE Lanes::F Element(Lanes::U units, int s) {
    const Lanes::U magnitude = (units >> (8 * s)) & 0x7fU;
    const Lanes::F value = (Lanes::F)(magnitude << 20) * Lanes::Set1(0x1p120f);
    return (Lanes::F)((Lanes::U)value | (((units >> (8 * s)) & 0x80U) << 24) | (Lanes::U)(magnitude == 0x7fU));
  }
};
struct DecodeE5M2 {
  static constexpr int kSub = 4;
  static KVANTA_INLINE Lanes::F Element(Lanes::U units, int s) { return FromFp16(((units >> (8 * s)) & 0xffU) << 8); }
};

template <class Decode>
struct IntegerCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = Decode::kOffset;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) {
    const Lanes::I i = Lanes::RoundToInt(x);
    std::memcpy(out, &i, sizeof i);
  }

  template <int kRows, bool kHalf>
  static KVANTA_INLINE void Dot(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                const int32_t* bias, Lanes::F* sums, Prefetcher& prefetch) {
    Lanes::I dots[kRows];
    for (int r = 0; r < kRows; ++r) dots[r] = Lanes::I{} + bias[r];
    for (int64_t i = 0; i < count; ++i) {
      prefetch.Step();
      const Lanes::U units = LoadUnits<kHalf>(lines + i * stride);
      for (int s = 0; s < kSub; ++s) {
        const Lanes::I x = Decode::Element(units, s);
        for (int r = 0; r < kRows; ++r) {
          int32_t c;
          std::memcpy(&c, coefficients[r] + (i * kSub + s) * 4, 4);
          dots[r] += x * c;
        }
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r] = Lanes::FromInt(dots[r]);
  }
};

struct DecodeInt8 {
  static constexpr int kSub = 4;
  static constexpr int kOffset = 0;
  static KVANTA_INLINE Lanes::I Element(Lanes::U units, int s) { return (Lanes::I)(units << (24 - 8 * s)) >> 24; }
};
struct DecodeKeyInt4 {
  static constexpr int kSub = 8;
  static constexpr int kOffset = 8;
  static KVANTA_INLINE Lanes::I Element(Lanes::U units, int s) { return (Lanes::I)((units >> (4 * s)) & 15U); }
};

// V: a unit holds 2 channels of 4 tokens. sums: [rows][first 16 channels, last 16 channels].
struct ValueInt4 {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 8;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { IntegerCode<DecodeInt8>::Pack(x, out); }

  template <int kRows>
  static KVANTA_INLINE void Dot2(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                 const int32_t* bias, Lanes::F* sums, Prefetcher& prefetch) {
    Lanes::I even[kRows], odd[kRows];
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = Lanes::I{} + bias[r];
    for (int64_t i = 0; i < count; ++i) {
      prefetch.Step();
      const Lanes::U units = LoadUnits<false>(lines + i * stride);
      for (int s = 0; s < kSub; ++s) {
        const Lanes::I x = (Lanes::I)((units >> (8 * s)) & 15U), y = (Lanes::I)((units >> (8 * s + 4)) & 15U);
        for (int r = 0; r < kRows; ++r) {
          int32_t c;
          std::memcpy(&c, coefficients[r] + (i * kSub + s) * 4, 4);
          even[r] += x * c;
          odd[r] += y * c;
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int j = 0; j < 16; ++j) {
        sums[2 * r + j / 8][2 * j % 16] = static_cast<float>(even[r][j]);
        sums[2 * r + j / 8][2 * j % 16 + 1] = static_cast<float>(odd[r][j]);
      }
    }
  }
};

// bytes[i] = table[bytes[i]] of 16 entries; n a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  for (int i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(table[bytes[i]]);
}

using CodeFp32 = FloatCode<DecodeFp32>;
using CodeBf16 = FloatCode<DecodeBf16>;
using CodeFp16 = FloatCode<DecodeFp16>;
using CodeE4M3 = FloatCode<DecodeE4M3>;
using CodeE5M2 = FloatCode<DecodeE5M2>;
using CodeInt8 = IntegerCode<DecodeInt8>;
using KeyInt4 = IntegerCode<DecodeKeyInt4>;

}  // namespace
}  // namespace kvanta::kernels
