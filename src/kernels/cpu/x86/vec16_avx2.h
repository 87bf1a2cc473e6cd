// 16 lanes in two ymm registers: AVX2, FMA, F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/vec16_exp.h"

namespace kvanta::kernels {
namespace {

struct Vec16 {
  static constexpr int kLanes = 16;
  struct F {
    __m256 lo, hi;
  };
  struct I {
    __m256i lo, hi;
  };

  static KVANTA_INLINE F Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static KVANTA_INLINE void Store(float* p, F v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  static KVANTA_INLINE F Set1(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
  }
  static KVANTA_INLINE F Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static KVANTA_INLINE F Add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
  static KVANTA_INLINE F Sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
  static KVANTA_INLINE F Mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
  static KVANTA_INLINE F Div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
  // b where a and b are unordered (NaN).
  static KVANTA_INLINE F Max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
  static KVANTA_INLINE F Min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
  static KVANTA_INLINE F Abs(F a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
  }
  static KVANTA_INLINE F Fma(F a, F b, F c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static KVANTA_INLINE F Sqrt(F a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
  // Lane i becomes lane i ^ kDistance: 1, 2, 4 or 8.
  template <int kDistance>
  static KVANTA_INLINE F Swap(F a) {
    if constexpr (kDistance == 8) return {a.hi, a.lo};
    if constexpr (kDistance == 4) return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
    constexpr int kOrder = kDistance == 1 ? _MM_SHUFFLE(2, 3, 0, 1) : _MM_SHUFFLE(1, 0, 3, 2);
    return {_mm256_permute_ps(a.lo, kOrder), _mm256_permute_ps(a.hi, kOrder)};
  }

  static KVANTA_INLINE F LoadTail(const float* p, int n) {
    // The address of the second half is formed only where it exists; masked-out lanes are not read.
    return {_mm256_maskload_ps(p, Mask(n)), n > 8 ? _mm256_maskload_ps(p + 8, Mask(n - 8)) : _mm256_setzero_ps()};
  }
  static KVANTA_INLINE void StoreTail(float* p, F v, int n) {
    _mm256_maskstore_ps(p, Mask(n), v.lo);
    if (n > 8) _mm256_maskstore_ps(p + 8, Mask(n - 8), v.hi);
  }

  // Tree: lane i + lane i + 8, then + 4, + 2, + 1.
  static KVANTA_INLINE float Sum(F v) {
    const __m256 s8 = _mm256_add_ps(v.lo, v.hi);
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
  }
  static KVANTA_INLINE float MaxOf(F v) {
    const __m256 s8 = _mm256_max_ps(v.lo, v.hi);
    const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
  }

  // Sum() and MaxOf() of four vectors each.
  static KVANTA_INLINE void SumsOf(const F* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = Sum(v[i]);
  }
  static KVANTA_INLINE void MaximaOf(const F* v, float* out) {
    __m128 x4[4];
    for (int i = 0; i < 4; ++i) {
      const __m256 x8 = _mm256_max_ps(v[i].lo, v[i].hi);
      x4[i] = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    }
    const __m128 a = _mm_max_ps(_mm_movelh_ps(x4[0], x4[1]), _mm_movehl_ps(x4[1], x4[0]));
    const __m128 b = _mm_max_ps(_mm_movelh_ps(x4[2], x4[3]), _mm_movehl_ps(x4[3], x4[2]));
    const __m128 even = _mm_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                 odd = _mm_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1));
    _mm_storeu_ps(out, _mm_max_ps(even, odd));
  }

  // Rounds to the nearest integer, ties to even.
  static KVANTA_INLINE F Round(F x) {
    return {_mm256_round_ps(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  static KVANTA_INLINE I RoundToInt(F x) { return {_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi)}; }
  static KVANTA_INLINE F FromInt(I x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
  static KVANTA_INLINE I SetInt(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static KVANTA_INLINE I AndInt(I x, int32_t mask) {
    const __m256i v = _mm256_set1_epi32(mask);
    return {_mm256_and_si256(x.lo, v), _mm256_and_si256(x.hi, v)};
  }
  static KVANTA_INLINE I RightInt(I x, int bits) {
    return {_mm256_srli_epi32(x.lo, bits), _mm256_srli_epi32(x.hi, bits)};
  }
  // 16 bytes as integers.
  static KVANTA_INLINE I LoadBytes(const uint8_t* p) { return {Widened(p), Widened(p + 8)}; }
  // 256 high + low.
  static KVANTA_INLINE I CombineTerms(I high, I low) {
    return {_mm256_add_epi32(_mm256_slli_epi32(high.lo, 8), low.lo),
            _mm256_add_epi32(_mm256_slli_epi32(high.hi, 8), low.hi)};
  }
  // value * 2^n for integral n in [-252, 254]: two factors, so that subnormal results round once.
  static KVANTA_INLINE F ScaleByPow2(F value, F n) {
    return {ScaleHalf(value.lo, _mm256_cvtps_epi32(n.lo)), ScaleHalf(value.hi, _mm256_cvtps_epi32(n.hi))};
  }
  static KVANTA_INLINE F Exp(F x) { return ExpOf<Vec16>(x); }
  // value * 2^n where n is the lowest 9 bits of `bits`; the result must be normal.
  static KVANTA_INLINE F AddToExponent(F value, F bits) {
    const auto add = [](__m256 x, __m256 n) {
      return _mm256_castsi256_ps(
          _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
    };
    return {add(value.lo, bits.lo), add(value.hi, bits.hi)};
  }

  static KVANTA_INLINE F LoadFp16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  }

  static KVANTA_INLINE F LoadE4M3(const uint8_t* p) { return Mul(FromE4M3(p), Set1(256)); }
  static KVANTA_INLINE F LoadE8M0(const uint8_t* p) {
    const auto half = [](const uint8_t* bytes) {
      const __m256i x = Widened(bytes);
      const __m256i smallest =
          _mm256_and_si256(_mm256_cmpeq_epi32(x, _mm256_setzero_si256()), _mm256_set1_epi32(0x00400000));
      return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(x, 23), smallest));
    };
    return {half(p), half(p + 8)};
  }
  // 16 + 16 codes of e4m3, times 2^-8.
  static KVANTA_INLINE void LoadE4M3Pair(const uint8_t* p, F& a, F& b) {
    a = FromE4M3(p);
    b = FromE4M3(p + 16);
  }
  static KVANTA_INLINE F LoadUint8(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(Widened(p)), _mm256_cvtepi32_ps(Widened(p + 8))};
  }
  static KVANTA_INLINE F LoadInt8(const uint8_t* p) {
    const auto half = [](const uint8_t* bytes) {
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
    };
    return {half(p), half(p + 8)};
  }
  // Low and high halves of 16 bytes, 0 to 15.
  static KVANTA_INLINE void LoadNibbles(const uint8_t* p, F& low, F& high) {
    const __m256i a = Widened(p), b = Widened(p + 8), mask = _mm256_set1_epi32(15);
    low = {_mm256_cvtepi32_ps(_mm256_and_si256(a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(b, mask))};
    high = {_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4))};
  }
  // Elements of a table of 16, by the low and the high halves of 16 bytes.
  static KVANTA_INLINE void LookupNibbles(const uint8_t* p, F table, F& low, F& high) {
    const __m256i a = Widened(p), b = Widened(p + 8);
    low = {Lookup(table, a), Lookup(table, b)};
    high = {Lookup(table, _mm256_srli_epi32(a, 4)), Lookup(table, _mm256_srli_epi32(b, 4))};
  }

  // bf16 weights: a step of a panel is [16 columns][2 k] codes, multiplied in kBf16Phases phases; a phase broadcasts
  // one Bf16X. The even code of a 32-bit pair is shifted into place, the odd one masked: both are then f32 values.
  using Bf16X = float;
  using Bf16W = F;
  static constexpr int kBf16Phases = 2;
  template <int kPhase>
  static KVANTA_INLINE Bf16W LoadBf16Block(const uint16_t* block) {
    const __m256i* p = reinterpret_cast<const __m256i*>(block);
    const __m256i lo = _mm256_loadu_si256(p), hi = _mm256_loadu_si256(p + 1);
    if constexpr (kPhase == 0) {
      return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
    } else {
      const __m256i odd = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000U));
      return {_mm256_castsi256_ps(_mm256_and_si256(lo, odd)), _mm256_castsi256_ps(_mm256_and_si256(hi, odd))};
    }
  }
  static KVANTA_INLINE F BroadcastBf16(const Bf16X* x) { return Set1(*x); }
  static KVANTA_INLINE F DotBf16(F x, Bf16W w, F sum) { return Fma(x, w, sum); }

  // Register tile of matrix kernels: at most kTileSums sums, kRowTile rows, kColumnTile columns of 16 lanes. 6 x 1: 12
  // of the 16 registers hold sums, two a column of weights, one the broadcast, one the mask of odd codes.
  static constexpr int kTileSums = 6;
  static constexpr int kRowTile = kSmallTiles ? 3 : 6;
  static constexpr int kColumnTile = kSmallTiles ? 2 : 4;

 private:
  static KVANTA_INLINE __m256i Widened(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  // 16 codes of e4m3, times 2^-8: seeeemmm -> s0eeeemmm0000000 is fp16, subnormals included.
  static KVANTA_INLINE F FromE4M3(const uint8_t* p) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(-0x4080));  // 0xbf80
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  }
  // By the lowest 4 bits of the lanes.
  static KVANTA_INLINE __m256 Lookup(F table, __m256i index) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 as the sign
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.lo, index), _mm256_permutevar8x32_ps(table.hi, index),
                            upper);
  }
  // All ones in the first n of 8 lanes.
  static KVANTA_INLINE __m256i Mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static KVANTA_INLINE __m256 Pow2(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static KVANTA_INLINE __m256 ScaleHalf(__m256 value, __m256i n) {
    const __m256i half = _mm256_srai_epi32(n, 1);
    return _mm256_mul_ps(_mm256_mul_ps(value, Pow2(half)), Pow2(_mm256_sub_epi32(n, half)));
  }
};

}  // namespace
}  // namespace kvanta::kernels
