// 16 lanes in compiler vectors: any CPU. Fma rounds twice here (a fused one without hardware is a library call per
// lane); products of bf16 values are exact in f32, so bf16 dots are the same bits as on AVX2 all the same.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/lanes_exp.h"

namespace kvanta::kernels {
namespace {

struct Lanes {
  static constexpr int kLanes = 16;
  using F = float __attribute__((vector_size(64)));
  using I = int32_t __attribute__((vector_size(64)));
  using U = uint32_t __attribute__((vector_size(64)));

  static KVANTA_INLINE F Load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static KVANTA_INLINE void Store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
  static KVANTA_INLINE F Set1(float x) { return F{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
  static KVANTA_INLINE F Zero() { return F{}; }
  static KVANTA_INLINE F Add(F a, F b) { return a + b; }
  static KVANTA_INLINE F Sub(F a, F b) { return a - b; }
  static KVANTA_INLINE F Mul(F a, F b) { return a * b; }
  static KVANTA_INLINE F Div(F a, F b) { return a / b; }
  // As x86: b where a and b do not compare (NaN).
  static KVANTA_INLINE F Max(F a, F b) { return a > b ? a : b; }
  static KVANTA_INLINE F Min(F a, F b) { return a < b ? a : b; }
  static KVANTA_INLINE F Abs(F a) { return (F)((U)a & 0x7fffffffU); }
  static KVANTA_INLINE F Fma(F a, F b, F c) { return a * b + c; }
  static KVANTA_INLINE F Sqrt(F a) {
    for (int i = 0; i < kLanes; ++i) a[i] = __builtin_sqrtf(a[i]);
    return a;
  }

  static KVANTA_INLINE F LoadTail(const float* p, int n) {
    F v{};
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return v;
  }
  static KVANTA_INLINE void StoreTail(float* p, F v, int n) {
    for (int i = 0; i < n; ++i) p[i] = v[i];
  }

  // Tree: lane i + lane i + 8, then + 4, + 2, + 1.
  static KVANTA_INLINE float Sum(F v) {
    float s[kLanes];
    Store(s, v);
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) s[i] += s[i + half];
    }
    return s[0];
  }
  static KVANTA_INLINE float MaxOf(F v) {
    float s[kLanes];
    Store(s, v);
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) s[i] = s[i] > s[i + half] ? s[i] : s[i + half];
    }
    return s[0];
  }
  // Of four vectors at a time.
  static KVANTA_INLINE void MaximaOf(const F* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = MaxOf(v[i]);
  }

  // To the nearest even integer, |x| < 2^22.
  static KVANTA_INLINE F Round(F x) {
    const F magic = Set1(12582912.0f);
    return (x + magic) - magic;
  }
  static KVANTA_INLINE I RoundToInt(F x) { return ToInt(Round(x)); }
  static KVANTA_INLINE F FromInt(I x) { return __builtin_convertvector(x, F); }
  // value * 2^n for integral n in [-252, 254]: two factors, so that subnormal results round once.
  static KVANTA_INLINE F ScaleByPow2(F value, F n) {
    const I i = ToInt(n);
    const I half = i >> 1;
    return value * Pow2(half) * Pow2(i - half);
  }
  static KVANTA_INLINE F Exp(F x) { return ExpOf<Lanes>(x); }
  // value * 2^n where n is the lowest 9 bits of `bits`; the result must be normal.
  static KVANTA_INLINE F AddToExponent(F value, F bits) { return (F)((U)value + ((U)bits << 23)); }

  static KVANTA_INLINE F LoadFp16(const uint16_t* p) {
    U h;
    for (int i = 0; i < kLanes; ++i) h[i] = p[i];
    // Shifted into place and multiplied by 2^112: exact, subnormals included; then infinities and NaN get their
    // exponent.
    const U magnitude = (h & 0x7fffU) << 13;
    const F scaled = (F)magnitude * Set1(0x1p112f);
    const U special = (U)(magnitude >= 0x0f800000U) & 0x7f800000U;
    return (F)((U)scaled | special | ((h & 0x8000U) << 16));
  }
  static KVANTA_INLINE F LoadBf16(const uint16_t* p) {
    U h;
    for (int i = 0; i < kLanes; ++i) h[i] = uint32_t{p[i]} << 16;
    return (F)h;
  }

  static KVANTA_INLINE F LoadE4M3(const uint8_t* p) {
    U x;
    for (int i = 0; i < kLanes; ++i) x[i] = p[i];
    // As an f32 with the exponent field unshifted: the value times 2^(7 - 127), subnormals included.
    return (F)((x & 0x7fU) << 20 | (x & 0x80U) << 24) * Set1(0x1p120f);
  }
  static KVANTA_INLINE F LoadE8M0(const uint8_t* p) {
    U x;
    for (int i = 0; i < kLanes; ++i) x[i] = p[i] == 0 ? 0x00400000U : uint32_t{p[i]} << 23U;
    return (F)x;
  }

  // bf16 weights: a block is [16 columns][2 k] codes, multiplied in kBf16Phases steps; a step broadcasts one Bf16X.
  using Bf16X = float;
  using Bf16W = F;
  static constexpr int kBf16Phases = 2;
  template <int kPhase>
  static KVANTA_INLINE Bf16W LoadBf16Block(const uint16_t* block) {
    U pair;
    std::memcpy(&pair, block, sizeof pair);
    return kPhase == 0 ? (F)(pair << 16) : (F)(pair & 0xffff0000U);
  }
  static KVANTA_INLINE F SetBf16X(const Bf16X* x) { return Set1(*x); }
  static KVANTA_INLINE F DotBf16(F x, Bf16W w, F sum) { return x * w + sum; }

  // The unit's cheapest exact dot of 8-bit codes: sum + a b, here lane by lane.
  static constexpr int kInt8DotProducts = 16;
  static KVANTA_INLINE I DotInt8(I sum, I a, I b) { return sum + a * b; }
  static constexpr int kNarrowDotProducts = kInt8DotProducts;
  static KVANTA_INLINE I DotNarrow(I sum, I a, I b) { return DotInt8(sum, a, b); }
  static constexpr int kCoefficientTerms = 1;

  // Register tile of matrix kernels, in F: at most kTileSums sums, kRowTile rows, kColumnTile columns of lanes.
  static constexpr int kTileSums = 3;
  static constexpr int kRowTile = kSmallTiles ? 2 : 3;
  static constexpr int kColumnTile = 2;

 private:
  static KVANTA_INLINE I ToInt(F x) { return __builtin_convertvector(x, I); }
  static KVANTA_INLINE F Pow2(I n) { return (F)((n + 127) << 23); }
};

}  // namespace
}  // namespace kvanta::kernels
