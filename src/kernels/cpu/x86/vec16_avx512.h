// 16 lanes in one zmm register: AVX-512 F, BW, VL, DQ, VBMI, VNNI; BF16 where the including unit has it.
#pragma once

#ifndef KVANTA_EMULATE_AVX512  // the tests replace it by SIMDe, to run this unit on any CPU
// GCC's intrinsics start from an undefined register (`__m512 y = y`) and warn about it where they are inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "base/dtype.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/vec16_exp.h"

namespace kvanta::kernels {
namespace {

KVANTA_INLINE __m512i Broadcast32(const uint8_t* bytes) {
  int32_t value;
  std::memcpy(&value, bytes, sizeof value);
  return _mm512_set1_epi32(value);
}

// sum + four products of u8 a and s8 b in every lane. Assembly, for with the intrinsic GCC 12 copies every sum before
// and after.
KVANTA_INLINE __m512i DotBytes(__m512i sum, __m512i a, __m512i b) {
#ifdef KVANTA_EMULATE_AVX512
  return _mm512_dpbusd_epi32(sum, a, b);
#else
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#endif
}

struct Vec16 {
  static constexpr int kLanes = 16;
  using F = __m512;
  using I = __m512i;

  static KVANTA_INLINE F Load(const float* p) { return _mm512_loadu_ps(p); }
  static KVANTA_INLINE void Store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static KVANTA_INLINE F Set1(float x) { return _mm512_set1_ps(x); }
  static KVANTA_INLINE F Zero() { return _mm512_setzero_ps(); }
  static KVANTA_INLINE F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static KVANTA_INLINE F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static KVANTA_INLINE F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static KVANTA_INLINE F Div(F a, F b) { return _mm512_div_ps(a, b); }
  // b where a and b are unordered (NaN).
  static KVANTA_INLINE F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static KVANTA_INLINE F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static KVANTA_INLINE F Abs(F a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)));
  }
  static KVANTA_INLINE F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static KVANTA_INLINE F Sqrt(F a) { return _mm512_sqrt_ps(a); }
  // Lane i becomes lane i ^ kDistance: 1, 2, 4 or 8.
  template <int kDistance>
  static KVANTA_INLINE F Swap(F a) {
    constexpr int kPairs = _MM_SHUFFLE(2, 3, 0, 1), kHalves = _MM_SHUFFLE(1, 0, 3, 2);
    if constexpr (kDistance <= 2) return _mm512_permute_ps(a, kDistance == 1 ? kPairs : kHalves);
    return Quarters < kDistance == 4 ? kPairs : kHalves > (a, a);
  }

  static KVANTA_INLINE F LoadTail(const float* p, int n) { return _mm512_maskz_loadu_ps(Mask(n), p); }
  static KVANTA_INLINE void StoreTail(float* p, F v, int n) { _mm512_mask_storeu_ps(p, Mask(n), v); }

  // Tree: lane i + lane i + 8, then + 4, + 2, + 1.
  static KVANTA_INLINE float Sum(F v) {
    const __m256 s8 = _mm256_add_ps(LowHalf(v), HighHalf(v));
    const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
  }
  static KVANTA_INLINE float MaxOf(F v) {
    const __m256 s8 = _mm256_max_ps(LowHalf(v), HighHalf(v));
    const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_max_ss(s2, _mm_movehdup_ps(s2)));
  }

  // Sum() and MaxOf() of four vectors each.
  static KVANTA_INLINE void SumsOf(const F* v, float* out) { FoldFour<Add>(v, out); }
  static KVANTA_INLINE void MaximaOf(const F* v, float* out) { FoldFour<Max>(v, out); }
  template <F (*kFold)(F, F)>
  static KVANTA_INLINE void FoldFour(const F* v, float* out) {
    const F a8 = kFold(Quarters<0x44>(v[0], v[1]), Quarters<0xee>(v[0], v[1]));
    const F b8 = kFold(Quarters<0x44>(v[2], v[3]), Quarters<0xee>(v[2], v[3]));
    const F x4 = kFold(Quarters<0x88>(a8, b8), Quarters<0xdd>(a8, b8));
    const F x2 = kFold(x4, _mm512_permute_ps(x4, _MM_SHUFFLE(1, 0, 3, 2)));
    const F x1 = kFold(x2, _mm512_permute_ps(x2, _MM_SHUFFLE(2, 3, 0, 1)));
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, x1)));
  }

  // Rounds to the nearest integer, ties to even.
  static KVANTA_INLINE F Round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static KVANTA_INLINE I RoundToInt(F x) { return _mm512_cvtps_epi32(x); }
  static KVANTA_INLINE F FromInt(I x) { return _mm512_cvtepi32_ps(x); }
  static KVANTA_INLINE I SetInt(int32_t x) { return _mm512_set1_epi32(x); }
  static KVANTA_INLINE I AndInt(I x, int32_t mask) { return _mm512_and_si512(x, _mm512_set1_epi32(mask)); }
  static KVANTA_INLINE I RightInt(I x, int bits) { return _mm512_srli_epi32(x, static_cast<unsigned>(bits)); }
  // 16 bytes as integers.
  static KVANTA_INLINE I LoadBytes(const uint8_t* p) { return Widened(p); }
  // 256 high + low.
  static KVANTA_INLINE I CombineTerms(I high, I low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }
  static KVANTA_INLINE F ScaleByPow2(F value, F n) { return _mm512_scalef_ps(value, n); }
  static KVANTA_INLINE F Exp(F x) { return ExpOf<Vec16>(x); }
  // value * 2^n where n is the lowest 9 bits of `bits`; the result must be normal.
  static KVANTA_INLINE F AddToExponent(F value, F bits) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(bits), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), n));
  }

  static KVANTA_INLINE F LoadFp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }

  static KVANTA_INLINE F LoadE4M3(const uint8_t* p) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    // seeeemmm -> s0eeeemmm0000000: fp16 of 2^-8 times the value, subnormals included, whose conversion is never slow.
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(-0x4080));  // 0xbf80
    return _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256));
  }
  static KVANTA_INLINE F LoadE8M0(const uint8_t* p) {
    const __m512i x = Widened(p);
    const __mmask16 zero = _mm512_cmpeq_epi32_mask(x, _mm512_setzero_si512());
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_slli_epi32(x, 23), zero, _mm512_set1_epi32(0x00400000)));
  }
  // 16 + 16 codes of e4m3, times 2^-8.
  static KVANTA_INLINE void LoadE4M3Pair(const uint8_t* p, F& a, F& b) {
    const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(-0x4080));
    a = _mm512_cvtph_ps(_mm512_castsi512_si256(bits));
    b = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1));
  }
  static KVANTA_INLINE F LoadUint8(const uint8_t* p) { return _mm512_cvtepi32_ps(Widened(p)); }
  static KVANTA_INLINE F LoadInt8(const uint8_t* p) {
    const __m512i high = _mm512_slli_epi32(Widened(p), 24);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24));
  }
  // Low and high halves of 16 bytes, 0 to 15.
  static KVANTA_INLINE void LoadNibbles(const uint8_t* p, F& low, F& high) {
    const __m512i x = Widened(p);
    low = _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15)));
    high = _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 4));
  }
  // Elements of a table of 16, by the low and the high halves of 16 bytes.
  static KVANTA_INLINE void LookupNibbles(const uint8_t* p, F table, F& low, F& high) {
    const __m512i x = Widened(p);  // the permutation reads the lowest 4 bits of a lane
    low = _mm512_permutexvar_ps(x, table);
    high = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
  }

  // bf16 weights: a step of a panel is [16 columns][2 k] codes, multiplied in kBf16Phases phases; a phase broadcasts
  // one Bf16X: a pair of codes for vdpbf16ps, else one as f32, as on AVX2 and with the same bits.
#if defined(__AVX512BF16__) || defined(KVANTA_EMULATE_AVX512_BF16)
  using Bf16X = uint32_t;
  using Bf16W = __m512bh;
  static constexpr int kBf16Phases = 1;
  template <int kPhase>
  static KVANTA_INLINE Bf16W LoadBf16Block(const uint16_t* block) {
    return (Bf16W)_mm512_loadu_si512(block);
  }
  static KVANTA_INLINE Bf16W BroadcastBf16(const Bf16X* x) {
    return (Bf16W)_mm512_set1_epi32(static_cast<int32_t>(*x));
  }
  static KVANTA_INLINE F DotBf16(Bf16W x, Bf16W w, F sum) {
    return _mm512_dpbf16_ps(sum, x, w);
  }
  // sum + two products of bf16 a and b in every lane. Assembly, as DotBytes().
  static KVANTA_INLINE F DotBf16Pairs(I a, I b, F sum) {
#ifdef KVANTA_EMULATE_AVX512
    return _mm512_dpbf16_ps(sum, (Bf16W)a, (Bf16W)b);
#else
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#endif
  }
  // Stores 16 bf16, rounded to nearest even; NaN stays NaN.
  static KVANTA_INLINE void StoreBf16(F x, uint8_t* out) {
#ifdef KVANTA_EMULATE_AVX512
    float values[kLanes];
    Store(values, x);
    for (int i = 0; i < kLanes; ++i) {
      const uint16_t code = FloatToBf16(values[i]);
      std::memcpy(out + 2 * i, &code, sizeof code);
    }
#else
    const __m256bh codes = _mm512_cvtneps_pbh(x);
    std::memcpy(out, &codes, sizeof codes);
#endif
  }
#else
  using Bf16X = float;
  using Bf16W = F;
  static constexpr int kBf16Phases = 2;
  template <int kPhase>
  static KVANTA_INLINE Bf16W LoadBf16Block(const uint16_t* block) {
    const I pairs = _mm512_loadu_si512(block);
    return _mm512_castsi512_ps(kPhase == 0 ? _mm512_slli_epi32(pairs, 16) : AndInt(pairs, -0x10000));
  }
  static KVANTA_INLINE F BroadcastBf16(const Bf16X* x) {
    return Set1(*x);
  }
  static KVANTA_INLINE F DotBf16(F x, Bf16W w, F sum) {
    return Fma(x, w, sum);
  }
#endif

  // Register tile of matrix kernels: at most kTileSums sums, kRowTile rows, kColumnTile columns of 16 lanes.
  static constexpr int kTileSums = kSmallTiles ? 8 : 24;
  static constexpr int kRowTile = kSmallTiles ? 5 : 12;
  static constexpr int kColumnTile = kSmallTiles ? 3 : 4;

 private:
  // Two quarters of a, then two of b.
  template <int kWhich>
  static KVANTA_INLINE F Quarters(F a, F b) {
    return _mm512_castsi512_ps(_mm512_shuffle_i32x4(_mm512_castps_si512(a), _mm512_castps_si512(b), kWhich));
  }
  static KVANTA_INLINE __m512i Widened(const uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static KVANTA_INLINE __mmask16 Mask(int n) {
    return static_cast<__mmask16>((1U << n) - 1U);
  }
  static KVANTA_INLINE __m256 LowHalf(F v) {
    return _mm512_castps512_ps256(v);
  }
  static KVANTA_INLINE __m256 HighHalf(F v) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
  }
};

}  // namespace
}  // namespace kvanta::kernels
