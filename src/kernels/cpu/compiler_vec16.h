// 16 lanes in four compiler vectors: the portable unit's Vec16 and the base of NEON's, which replaces what has better
// instructions. Fma rounds twice (a fused one without hardware is a library call per lane); products of bf16 values are
// exact in f32 in its normal range, where bf16 dots are bit-identical to AVX2 nevertheless.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/vec16_exp.h"
#include "kernels/cpu/vectors_portable.h"

namespace kvanta::kernels {
namespace {

struct CompilerVec16 {
  static constexpr int kLanes = 16;
  using F = Vectors<F4, 4>;
  using I = Vectors<I4, 4>;
  using U = Vectors<U4, 4>;

  static KVANTA_INLINE F Load(const float* p) { return LoadVectors<F4, 4>(p); }
  static KVANTA_INLINE void Store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
  static KVANTA_INLINE F Set1(float x) {
    const F4 v = Broadcast(x);
    return {{v, v, v, v}};
  }
  static KVANTA_INLINE F Zero() { return {}; }
  static KVANTA_INLINE F Add(F a, F b) { return a + b; }
  static KVANTA_INLINE F Sub(F a, F b) {
    return Each(
        [](F4 x, F4 y) __attribute__((always_inline)) { return x - y; }, a, b);
  }
  static KVANTA_INLINE F Mul(F a, F b) { return a * b; }
  static KVANTA_INLINE F Div(F a, F b) {
    return Each(
        [](F4 x, F4 y) __attribute__((always_inline)) { return x / y; }, a, b);
  }
  // b where a and b are unordered (NaN), as on x86.
  static KVANTA_INLINE F Max(F a, F b) { return Each(MaxOfTwo, a, b); }
  static KVANTA_INLINE F Min(F a, F b) {
    return Each(
        [](F4 x, F4 y) __attribute__((always_inline)) { return x < y ? x : y; }, a, b);
  }
  static KVANTA_INLINE F Abs(F a) {
    return Each(
        [](F4 x) __attribute__((always_inline)) { return (F4)((U4)x & 0x7fffffffU); }, a);
  }
  static KVANTA_INLINE F Fma(F a, F b, F c) { return a * b + c; }
  static KVANTA_INLINE F Sqrt(F a) {
    float s[kLanes];
    Store(s, a);
    for (float& x : s) x = __builtin_sqrtf(x);
    return Load(s);
  }
  // Lane i becomes lane i ^ kDistance: 1, 2, 4 or 8.
  template <int kDistance>
  static KVANTA_INLINE F Swap(F a) {
    if constexpr (kDistance == 8) return {{a.v[2], a.v[3], a.v[0], a.v[1]}};
    if constexpr (kDistance == 4) return {{a.v[1], a.v[0], a.v[3], a.v[2]}};
    return Each(
        [](F4 x) __attribute__((always_inline)) {
          if constexpr (kDistance == 1) return __builtin_shufflevector(x, x, 1, 0, 3, 2);
          return __builtin_shufflevector(x, x, 2, 3, 0, 1);
        },
        a);
  }

  static KVANTA_INLINE F LoadTail(const float* p, int n) {
    float v[kLanes] = {};
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return Load(v);
  }
  static KVANTA_INLINE void StoreTail(float* p, F v, int n) {
    float s[kLanes];
    Store(s, v);
    for (int i = 0; i < n; ++i) p[i] = s[i];
  }

  // Tree: lane i + lane i + 8, then + 4, + 2, + 1.
  static KVANTA_INLINE float Sum(F v) {
    const F4 s4 = (v.v[0] + v.v[2]) + (v.v[1] + v.v[3]);
    const F4 s2 = s4 + __builtin_shufflevector(s4, s4, 2, 3, 2, 3);
    return s2[0] + s2[1];
  }
  static KVANTA_INLINE float MaxOf(F v) {
    const F4 m4 = MaxOfTwo(MaxOfTwo(v.v[0], v.v[2]), MaxOfTwo(v.v[1], v.v[3]));
    const F4 m2 = MaxOfTwo(m4, __builtin_shufflevector(m4, m4, 2, 3, 2, 3));
    return m2[0] > m2[1] ? m2[0] : m2[1];
  }
  // Sum() and MaxOf() of four vectors each.
  static KVANTA_INLINE void SumsOf(const F* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = Sum(v[i]);
  }
  static KVANTA_INLINE void MaximaOf(const F* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = MaxOf(v[i]);
  }

  // Rounds to the nearest integer, ties to even; |x| < 2^22.
  static KVANTA_INLINE F Round(F x) {
    return Each(
        [](F4 y) __attribute__((always_inline)) { return (y + Broadcast(12582912.0f)) - Broadcast(12582912.0f); }, x);
  }
  static KVANTA_INLINE I RoundToInt(F x) { return ToInt(Round(x)); }
  static KVANTA_INLINE F FromInt(I x) {
    return Each(
        [](I4 y) __attribute__((always_inline)) { return __builtin_convertvector(y, F4); }, x);
  }
  static KVANTA_INLINE I SetInt(int32_t x) {
    return Each(
        [&](I4 zero) __attribute__((always_inline)) { return zero + x; }, I{});
  }
  static KVANTA_INLINE I AndInt(I x, int32_t mask) {
    return Each(
        [&](I4 y) __attribute__((always_inline)) { return y & mask; }, x);
  }
  static KVANTA_INLINE I RightInt(I x, int bits) {
    return Each(
        [&](I4 y) __attribute__((always_inline)) { return (I4)((U4)y >> static_cast<uint32_t>(bits)); }, x);
  }
  // 16 bytes as integers.
  static KVANTA_INLINE I LoadBytes(const uint8_t* p) { return Cast<I4>(WidenBytes(p)); }
  // 256 high + low.
  static KVANTA_INLINE I CombineTerms(I high, I low) {
    return Each(
        [](I4 a, I4 b) __attribute__((always_inline)) { return (a << 8) + b; }, high, low);
  }
  // value * 2^n for integral n in [-252, 254]: two factors, so that subnormal results round once.
  static KVANTA_INLINE F ScaleByPow2(F value, F n) {
    const auto scale = [](F4 x, I4 i) __attribute__((always_inline)) {
      const I4 half = i >> 1;
      return x * (F4)((half + 127) << 23) * (F4)((i - half + 127) << 23);
    };
    return Each(scale, value, ToInt(n));
  }
  static KVANTA_INLINE F Exp(F x) { return ExpOf<CompilerVec16>(x); }
  // value * 2^n where n is the lowest 9 bits of `bits`; the result must be normal.
  static KVANTA_INLINE F AddToExponent(F value, F bits) {
    return Each(
        [](F4 x, F4 n) __attribute__((always_inline)) { return (F4)((U4)x + ((U4)n << 23)); }, value, bits);
  }

  // Converts fp16 in the low half of each lane: shifted into place and multiplied by 2^112, which is exact, subnormals
  // included; then infinities and NaN get their exponent.
  static KVANTA_INLINE F4 FromFp16(U4 bits) {
    const U4 magnitude = (bits & 0x7fffU) << 13;
    const U4 special = (U4)((I4)magnitude > 0x0f7fffff) & 0x7f800000U;
    return (F4)((U4)((F4)magnitude * Broadcast(0x1p112f)) | special | ((bits & 0x8000U) << 16));
  }
  static KVANTA_INLINE F LoadFp16(const uint16_t* p) { return Each(FromFp16, WidenShorts(p)); }

  // Converts e4m3 in the highest byte of each lane; NaN becomes 480. Normal codes are shifted into place as f32. A
  // subnormal code then reads (1 + m / 8) 2^-7 instead of (m / 8) 2^-6: add one to the exponent and subtract 2^-6.
  // (Multiplying by a subnormal f32 would take some CPUs a hundred cycles.)
  static KVANTA_INLINE F4 FromUpperE4M3(U4 code) {
    const U4 magnitude = code & 0x7f000000U;
    const U4 subnormal = (U4)((I4)magnitude < 0x08000000);
    const F4 bits = (F4)((magnitude >> 4) + 0x3c000000U + (subnormal & 0x00800000U));
    const F4 value = bits - (F4)(subnormal & 0x3c800000U);  // 2^-6
    return (F4)((U4)value | (code & 0x80000000U));
  }
  static KVANTA_INLINE F LoadE4M3(const uint8_t* p) {
    return Each(
        [](U4 x) __attribute__((always_inline)) { return FromUpperE4M3(x << 24); }, WidenBytes(p));
  }
  static KVANTA_INLINE F LoadE8M0(const uint8_t* p) {
    const auto decode = [](U4 x) __attribute__((always_inline)) {
      return (F4)((x << 23) | ((U4)(x == 0) & 0x00400000U));
    };
    return Each(decode, WidenBytes(p));
  }
  // 16 + 16 codes of e4m3, times 2^-8: as fp16 with the exponent field unshifted.
  static KVANTA_INLINE void LoadE4M3Pair(const uint8_t* p, F& a, F& b) {
    const auto decode = [](U4 x) __attribute__((always_inline)) {
      return FromFp16((x & 0x7fU) << 7 | (x & 0x80U) << 8);
    };
    a = Each(decode, WidenBytes(p));
    b = Each(decode, WidenBytes(p + 16));
  }
  static KVANTA_INLINE F LoadUint8(const uint8_t* p) { return FromInt(Cast<I4>(WidenBytes(p))); }
  static KVANTA_INLINE F LoadInt8(const uint8_t* p) {
    return FromInt(Each(
        [](U4 x) __attribute__((always_inline)) { return (I4)(x << 24) >> 24; }, WidenBytes(p)));
  }
  // Low and high halves of 16 bytes, 0 to 15.
  static KVANTA_INLINE void LoadNibbles(const uint8_t* p, F& low, F& high) {
    const U bytes = WidenBytes(p);
    low = FromInt(Each(
        [](U4 x) __attribute__((always_inline)) { return (I4)(x & 15U); }, bytes));
    high = FromInt(Each(
        [](U4 x) __attribute__((always_inline)) { return (I4)(x >> 4); }, bytes));
  }
  // Elements of a table of 16, by the low and the high halves of 16 bytes.
  static KVANTA_INLINE void LookupNibbles(const uint8_t* p, F table, F& low, F& high) {
    float values[kLanes], lows[kLanes], highs[kLanes];
    Store(values, table);
    for (int i = 0; i < kLanes; ++i) {
      lows[i] = values[p[i] & 15];
      highs[i] = values[p[i] >> 4];
    }
    low = Load(lows);
    high = Load(highs);
  }

  // bf16 weights: a step of a panel is [16 columns][2 k] codes, multiplied in kBf16Phases phases; a phase broadcasts
  // one Bf16X.
  using Bf16X = float;
  using Bf16W = F;
  static constexpr int kBf16Phases = 2;
  template <int kPhase>
  static KVANTA_INLINE Bf16W LoadBf16Block(const uint16_t* block) {
    return Each(
        [](U4 pair) __attribute__((always_inline)) { return (F4)(kPhase == 0 ? pair << 16 : pair & 0xffff0000U); },
        LoadVectors<U4, 4>(block));
  }
  static KVANTA_INLINE F BroadcastBf16(const Bf16X* x) { return Set1(*x); }
  static KVANTA_INLINE F DotBf16(F x, Bf16W w, F sum) { return Fma(x, w, sum); }

  // Register tile of matrix kernels: at most kTileSums sums, kRowTile rows, kColumnTile columns of 16 lanes. 3 sums
  // take 12 of 16 registers.
  static constexpr int kTileSums = 3;
  static constexpr int kRowTile = kSmallTiles ? 2 : 3;
  static constexpr int kColumnTile = 2;

 protected:
  static KVANTA_INLINE F4 MaxOfTwo(F4 a, F4 b) { return a > b ? a : b; }
  static KVANTA_INLINE I ToInt(F x) {
    return Each(
        [](F4 y) __attribute__((always_inline)) { return __builtin_convertvector(y, I4); }, x);
  }
};

}  // namespace
}  // namespace kvanta::kernels
