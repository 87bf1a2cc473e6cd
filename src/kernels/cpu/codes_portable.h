// The codes of the cache in compiler vectors, for any CPU. What Dot() computes is described in codes_avx2.h; here a
// coefficient is an f32 or an int32 in natural order.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/lanes_portable.h"
#include "kernels/cpu/line_run.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kQueryTile = kSmallTiles ? 1 : 2;
inline constexpr int kRunsBeside = 1;
inline constexpr int kLinesOfStep = 2;  // of a run, for which a dot makes a step of the prefetcher

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Lanes::F KeepOr(Lanes::F x, float other, int begin, int end) {
  constexpr Lanes::I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Lanes::F others = Lanes::Set1(other);
  return ((lane >= begin) & (lane < end)) ? x : others;
}

template <bool kTail>
KVANTA_INLINE Lanes::U LoadUnits(const uint8_t* bytes) {
  Lanes::U units{};
  std::memcpy(&units, bytes, kTail ? 32 : 64);
  return units;
}

template <class Decode>
struct FloatCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { std::memcpy(out, &x, sizeof x); }

  template <int kBeside, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const LineRun& run, const uint8_t* const* coefficients, const int32_t* /*bias*/,
                                Lanes::F* sums, Prefetcher& prefetch) {
    for (int r = 0; r < kRows; ++r) sums[r] = Lanes::Zero();
    for (int64_t i = 0; i < run.count; ++i) {
      if (i % 2 == 0) prefetch.Step();
      const Lanes::U units = LoadUnits<kTail>(run.lines + i * run.stride);
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

  template <int kBeside, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const LineRun& run, const uint8_t* const* coefficients, const int32_t* bias,
                                Lanes::F* sums, Prefetcher& prefetch) {
    Lanes::I dots[kRows];
    for (int r = 0; r < kRows; ++r) dots[r] = Lanes::I{} + bias[r];
    for (int64_t i = 0; i < run.count; ++i) {
      if (i % 2 == 0) prefetch.Step();
      const Lanes::U units = LoadUnits<kTail>(run.lines + i * run.stride);
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
// Lanes of 4 bytes, for codes_narrow.h; W: a vector of them.
template <class W, class I>
struct ByteLanes {
  using V = W;
  using Run = I;
  using Sum = I;
  static constexpr int64_t kLargestSum = int64_t{1} << 30;
  static constexpr bool kSumsAreWide = false;  // bytes as they are would need no less work here

  static KVANTA_INLINE V Load(const uint8_t* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  static KVANTA_INLINE V And(V x, int mask) { return x & (static_cast<uint32_t>(mask) * 0x01010101U); }
  static KVANTA_INLINE V Or(V a, V b) { return a | b; }
  static KVANTA_INLINE V Right(V x, int bits) { return x >> static_cast<uint32_t>(bits); }
  static KVANTA_INLINE V Left(V x, int bits) { return x << static_cast<uint32_t>(bits); }
  static KVANTA_INLINE V Sub(V x, int y) {  // x - y in every byte, for bytes and y below 128
    return ((x | 0x80808080U) - static_cast<uint32_t>(y) * 0x01010101U) ^ 0x80808080U;
  }
  // x - kMiddle, times the signs, 1 or -1, of a lane's four bytes.
  template <int kMiddle>
  static KVANTA_INLINE V SignedSub(V x, const uint8_t* signs) {
    uint32_t negative = 0;
    for (uint32_t b = 0; b < 4; ++b) negative |= (signs[b] > 127 ? 0xffU : 0U) << (8 * b);
    // In each byte: minus x is the complement of x, plus 1.
    const V ones = V{} + (negative & 0x01010101U);
    const V y = Sub(x, kMiddle) ^ negative;
    return ((y & 0x7f7f7f7fU) + ones) ^ (y & 0x80808080U);
  }
  // By the lowest 4 bits of x.
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    x &= 0x0f0f0f0fU;
    LookUpAll(reinterpret_cast<uint8_t*>(&x), table);
    return x;
  }
  static KVANTA_INLINE Run Start() { return Run{}; }
  static KVANTA_INLINE Run MulAdd(Run run, V x, const uint8_t* coefficients) {
    AddProducts(run, x, coefficients);
    return run;
  }
  template <bool kSmallBlocks>
  static KVANTA_INLINE const uint8_t* Weights(const uint8_t* four, const uint8_t* /*the same*/) {
    return four;
  }
  static KVANTA_INLINE Run MulAddSigned(Run run, const uint8_t* weights, V x) {
    AddSignedProducts(run, weights, x);
    return run;
  }
  static KVANTA_INLINE Sum Set(int32_t x) { return Sum{} + x; }
  static KVANTA_INLINE Sum Widen(Run run) { return run; }
  static KVANTA_INLINE Sum Add(Sum sum, Run run) { return sum + run; }
  static KVANTA_INLINE Sum Plus(Sum sum, int32_t x) { return sum + x; }

 private:
  // Not inlined: vectors that the machine does not have become much code.
  static __attribute__((noinline)) void LookUpAll(uint8_t* bytes, const uint8_t* table) {
    for (size_t i = 0; i < sizeof(V); ++i) bytes[i] = table[bytes[i]];
  }
  static __attribute__((noinline)) void AddProducts(Run& run, const V& x, const uint8_t* coefficients) {
    for (int b = 0; b < 4; ++b) {
      run += (Run)((x >> (8U * static_cast<uint32_t>(b))) & 255U) * static_cast<int8_t>(coefficients[b]);
    }
  }
  static __attribute__((noinline)) void AddSignedProducts(Run& run, const uint8_t* coefficients, const V& x) {
    for (int b = 0; b < 4; ++b) {
      run += ((Run)(x << (24U - 8U * static_cast<uint32_t>(b))) >> 24) * static_cast<int32_t>(coefficients[b]);
    }
  }
};

using Words8 = uint32_t __attribute__((vector_size(32)));
using Ints8 = int32_t __attribute__((vector_size(32)));

struct Bytes8 : ByteLanes<Words8, Ints8> {
  static constexpr int kChannels = 16;
  static constexpr int kBeside = 1;

  // As on AVX2.
  template <int kWidth, bool kTail>
  static KVANTA_INLINE V LoadSets(const uint8_t* plane, int group, int /*left*/) {
    V x{};
    if constexpr (kWidth == 4) {
      std::memcpy(&x, plane + group * 32, kTail ? 16 : 32);
      return x;
    }
    const uint8_t* unit = plane + group * kWidth / 2 * 16;
    uint8_t twice[32];
    std::memcpy(twice, unit, 16);
    std::memcpy(twice + 16, unit, 16);
    const uint32_t first = kWidth == 2 ? 0 : static_cast<uint32_t>(group % 2 * 4);
    constexpr uint32_t k = 2 * kWidth;
    return Load(twice) >> (Words8{0, 0, 0, 0, k, k, k, k} + first);
  }
  static KVANTA_INLINE void Interleave(Sum even, Sum odd, Lanes::F* out) {
    for (int i = 0; i < 8; ++i) {
      (*out)[2 * i] = static_cast<float>(even[i]);
      (*out)[2 * i + 1] = static_cast<float>(odd[i]);
    }
  }
};
using ValueBytes = Bytes8;

struct Bytes16 : ByteLanes<Lanes::U, Lanes::I> {
  static KVANTA_INLINE Lanes::F ToFloat(Sum sum) { return Lanes::FromInt(sum); }
  // 64 products a b from 0 to 255, rounded to bytes (others become one of these); of a, the i-th vector is
  // kPackFactor[i] times what it stands for.
  static constexpr float kPackFactor[4] = {1, 1, 1, 1};
  static KVANTA_INLINE void PackProducts(const Lanes::F* a, const Lanes::F* b, uint8_t* out) {
    for (int v = 0; v < 4; ++v) {
      const Lanes::I integers = Lanes::RoundToInt(Lanes::Mul(a[v], b[v]));
      for (int i = 0; i < 16; ++i) out[16 * v + i] = Clamp(integers[i]);
    }
  }
  // 64 numbers x inverse of magnitude up to 127, rounded to bytes in the order of PackEvenFirst().
  static KVANTA_INLINE void PackSigned(const float* x, float inverse, uint8_t* out) {
    for (int i = 0; i < 64; i += 16) PackEvenFirst(Lanes::Mul(Lanes::Load(x + i), Lanes::Set1(inverse)), out + i);
  }
  // The sum of n signed bytes, n a multiple of 64.
  static KVANTA_INLINE int32_t SumOf(const uint8_t* bytes, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += static_cast<int8_t>(bytes[i]);
    return sum;
  }
  // -1 where x is negative, else 1.
  static KVANTA_INLINE void Signs(Lanes::F x, int /*bits*/, uint8_t* out) {
    for (int b = 0; b < 16; ++b) out[b] = x[b] < 0 ? 0xff : 1;
  }
  // 16 integers of magnitude up to 127 as bytes, of every 8 the even ones first.
  static KVANTA_INLINE void PackEvenFirst(Lanes::F x, uint8_t* out) {
    const Lanes::I i = Lanes::RoundToInt(x);
    for (int b = 0; b < 16; ++b) out[b] = static_cast<uint8_t>(i[b / 8 * 8 + b % 4 * 2 + b % 8 / 4]);
  }

 private:
  static KVANTA_INLINE uint8_t Clamp(int32_t x) { return static_cast<uint8_t>(x < 0 ? 0 : x > 255 ? 255 : x); }
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
using CodeInt8Values = CodeInt8;

}  // namespace
}  // namespace kvanta::kernels
