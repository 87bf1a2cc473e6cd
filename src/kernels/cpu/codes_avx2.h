// The codes of the cache on AVX2: float codes become f32 lanes for FMA, integer codes 16-bit lanes for vpmaddwd.
//
// A unit is 4 bytes of one lane, holding kSub elements; a line is the same unit of 16 lanes. Dot() adds up, over
// `count` lines `stride` bytes apart, element * coefficient, where a row's coefficients are packed in unit order. For K
// a lane is a token and the coefficients are the query; for V a lane is a channel and they are p times the scales.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/bytes_256.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/lanes_avx2.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

// Query rows that share a loaded line: 8 sums, and room for what is decoded.
inline constexpr int kQueryTile = kSmallTiles ? 2 : 4;

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Lanes::F KeepOr(Lanes::F x, float other, int begin, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto keep = [&](__m256 value, int offset) {
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin - offset), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(end - 1 - offset)));
    return _mm256_blendv_ps(value, _mm256_set1_ps(other), _mm256_castsi256_ps(out));
  };
  return {keep(x.lo, 0), keep(x.hi, 8)};
}

KVANTA_INLINE __m256 Broadcast32(const uint8_t* bytes) {
  return _mm256_broadcast_ss(reinterpret_cast<const float*>(bytes));
}
KVANTA_INLINE __m256 Broadcast64(const uint8_t* bytes) {
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(bytes)));
}

// fp32 and bf16: one f32 lane per element of a unit.
template <class Decode>
struct LaneCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { Lanes::Store(reinterpret_cast<float*>(out), x); }

  template <int kRows, bool kHalf>
  static KVANTA_INLINE void Dot(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                const int32_t* /*bias*/, Lanes::F* sums, Prefetcher& prefetch) {
    __m256 lo[kRows], hi[kRows];
    for (int r = 0; r < kRows; ++r) lo[r] = hi[r] = _mm256_setzero_ps();
    for (int64_t i = 0; i < count; ++i) {
      prefetch.Step();
      const __m256i a = Load256(lines + i * stride);
      const __m256i b = kHalf ? _mm256_setzero_si256() : Load256(lines + i * stride + 32);
#pragma GCC unroll 2
      for (int s = 0; s < kSub; ++s) {
        const __m256 x = Decode::Element(a, s);
        const __m256 y = kHalf ? _mm256_setzero_ps() : Decode::Element(b, s);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 c = Broadcast32(coefficients[r] + (i * kSub + s) * 4);
          lo[r] = _mm256_fmadd_ps(x, c, lo[r]);
          if (!kHalf) hi[r] = _mm256_fmadd_ps(y, c, hi[r]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r] = {lo[r], hi[r]};
  }
};

struct DecodeFp32 {
  static constexpr int kSub = 1;
  static KVANTA_INLINE __m256 Element(__m256i unit, int) { return _mm256_castsi256_ps(unit); }
};
struct DecodeBf16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE __m256 Element(__m256i unit, int element) {
    return _mm256_castsi256_ps(element == 0 ? _mm256_slli_epi32(unit, 16)
                                            : _mm256_and_si256(unit, _mm256_set1_epi32(-0x10000)));
  }
};

// fp16 and fp8, by F16C: vcvtph2ps gives pairs of elements side by side, so a sum is kept as two halves of a pair
// and added across at the end. 8 lanes at a time: 2 sums per row.
template <class Decode>
struct PairCode {
  static constexpr int kSub = 2 * Decode::kPairs;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 4;

  // fp8: elements 0, 2, 1, 3 of each unit, the order in which shifts bring them out.
  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) {
    if (Decode::kPairs == 2) {
      x.lo = _mm256_permute_ps(x.lo, _MM_SHUFFLE(3, 1, 2, 0));
      x.hi = _mm256_permute_ps(x.hi, _MM_SHUFFLE(3, 1, 2, 0));
    }
    Lanes::Store(reinterpret_cast<float*>(out), x);
  }

  template <int kRows>
  static KVANTA_INLINE void DotHalf(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                    __m256* sums, Prefetcher& prefetch) {
    __m256 low[kRows], high[kRows];
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_ps();
    __m256i nan = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; ++i) {
      prefetch.Step();
      const __m256i unit = Load256(lines + i * stride);
      if (Decode::kNan != 0) {
        const __m256i code = _mm256_set1_epi8(Decode::kNan);
        nan = _mm256_or_si256(nan, _mm256_cmpeq_epi8(_mm256_and_si256(unit, code), code));
      }
#pragma GCC unroll 2
      for (int pair = 0; pair < Decode::kPairs; ++pair) {
        const __m256i half = Decode::Halves(unit, pair);
        const __m256 x = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        const __m256 y = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 c = Broadcast64(coefficients[r] + (i * Decode::kPairs + pair) * 8);
          low[r] = _mm256_fmadd_ps(x, c, low[r]);
          high[r] = _mm256_fmadd_ps(y, c, high[r]);
        }
      }
    }
    const __m256i ones = _mm256_set1_epi32(-1);
    const __m256 poison = _mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpeq_epi32(nan, _mm256_setzero_si256()), ones));
    for (int r = 0; r < kRows; ++r) {
      const __m256 across = _mm256_castpd_ps(
          _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(low[r], high[r])), _MM_SHUFFLE(3, 1, 2, 0)));
      sums[r] = _mm256_or_ps(_mm256_mul_ps(across, _mm256_set1_ps(Decode::kFactor)), poison);
    }
  }

  template <int kRows, bool kHalf>
  static KVANTA_INLINE void Dot(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                const int32_t* /*bias*/, Lanes::F* sums, Prefetcher& prefetch) {
    __m256 half[kRows];
    DotHalf<kRows>(lines, stride, count, coefficients, half, prefetch);
    for (int r = 0; r < kRows; ++r) sums[r] = {half[r], _mm256_setzero_ps()};
    if (kHalf) return;
    DotHalf<kRows>(lines + 32, stride, count, coefficients, half, prefetch);
    for (int r = 0; r < kRows; ++r) sums[r].hi = half[r];
  }
};

struct DecodeFp16 {
  static constexpr int kPairs = 1;
  static constexpr char kNan = 0;
  static constexpr float kFactor = 1;
  static KVANTA_INLINE __m256i Halves(__m256i unit, int) { return unit; }
};
// seeeemmm -> s0eeeemmm0000000 is an fp16 of 2^-8 times the value, subnormals included; the NaN code 0x7f is no NaN
// there and is looked for by itself.
struct DecodeE4M3 {
  static constexpr int kPairs = 2;
  static constexpr char kNan = 0x7f;
  static constexpr float kFactor = 256;
  static KVANTA_INLINE __m256i Halves(__m256i unit, int pair) {
    const __m256i top = pair == 0 ? _mm256_slli_epi16(unit, 8) : unit;
    return _mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(-0x4080));  // 0xbf80
  }
};
// seeeeemm is the upper byte of an fp16.
struct DecodeE5M2 {
  static constexpr int kPairs = 2;
  static constexpr char kNan = 0;
  static constexpr float kFactor = 1;
  static KVANTA_INLINE __m256i Halves(__m256i unit, int pair) {
    return pair == 0 ? _mm256_slli_epi16(unit, 8) : _mm256_and_si256(unit, _mm256_set1_epi16(-0x100));
  }
};

// 16 integers of magnitude up to 32512 to 16-bit lanes, then into the order of `shuffle` within each 128 bits.
KVANTA_INLINE void PackInt16(Lanes::F x, __m128i shuffle, uint8_t* out) {
  const Lanes::I i = Lanes::RoundToInt(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(i.lo, i.hi), _MM_SHUFFLE(3, 1, 2, 0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_shuffle_epi8(packed, _mm256_broadcastsi128_si256(shuffle)));
}
KVANTA_INLINE void AddProducts(__m256i a, __m256i b, __m256i& sum) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
KVANTA_INLINE __m256 ToFloat(__m256i x) {
  return _mm256_cvtepi32_ps(x);
}

// Coefficients in pairs (0, 2), (1, 3): shifts bring out the even and the odd bytes of a unit.
struct CodeInt8 {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 2;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) {
    PackInt16(x, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15), out);
  }

  template <int kRows, bool kHalf>
  static KVANTA_INLINE void Dot(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* coefficients,
                                const int32_t* /*bias*/, Lanes::F* sums, Prefetcher& prefetch) {
    __m256i lo[kRows], hi[kRows];
    for (int r = 0; r < kRows; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; ++i) {
      prefetch.Step();
      const __m256i a = Load256(lines + i * stride);
      const __m256i b = kHalf ? _mm256_setzero_si256() : Load256(lines + i * stride + 32);
      const __m256i a02 = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), a13 = _mm256_srai_epi16(a, 8);
      const __m256i b02 = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b13 = _mm256_srai_epi16(b, 8);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256i c02 = BroadcastQuad(coefficients[r] + i * 8), c13 = BroadcastQuad(coefficients[r] + i * 8 + 4);
        AddProducts(a02, c02, lo[r]);
        AddProducts(a13, c13, lo[r]);
        if (!kHalf) {
          AddProducts(b02, c02, hi[r]);
          AddProducts(b13, c13, hi[r]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r] = {ToFloat(lo[r]), ToFloat(hi[r])};
  }
};

// 8 lanes of 4 bytes, for codes_narrow.h. Products of unsigned and signed bytes are added in pairs of 16 bits.
struct Bytes8 : Bytes256 {
  using Run = __m256i;  // 16-bit sums
  using Sum = __m256i;
  static constexpr int64_t kLargestSum = 32767;

  static KVANTA_INLINE Run Start() { return _mm256_setzero_si256(); }
  static KVANTA_INLINE Run MulAdd(Run run, V x, const uint8_t* coefficients) {
    return InOrder(_mm256_add_epi16(run, _mm256_maddubs_epi16(x, BroadcastQuad(coefficients))));
  }
  static KVANTA_INLINE Run MulAddSigned(Run run, const uint8_t* coefficients, V x) {
    return InOrder(_mm256_add_epi16(run, _mm256_maddubs_epi16(BroadcastQuad(coefficients), x)));
  }
  static KVANTA_INLINE Sum Set(int32_t x) { return _mm256_set1_epi32(x); }
  static KVANTA_INLINE Sum Add(Sum sum, Run run) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(run, _mm256_set1_epi16(1)));
  }
  static KVANTA_INLINE Lanes::F Interleave(Sum even, Sum odd) {
    const __m256 e = ToFloat(even), o = ToFloat(odd);
    const __m256 a = _mm256_unpacklo_ps(e, o), b = _mm256_unpackhi_ps(e, o);
    return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
  }
};

// 16 lanes of 4 bytes.
struct Bytes16 {
  static constexpr bool kInHalves = true;
  struct Sum {
    __m256i lo, hi;
  };

  static KVANTA_INLINE Lanes::F ToFloat(Sum sum) { return {kernels::ToFloat(sum.lo), kernels::ToFloat(sum.hi)}; }

  // 16 integers of magnitude up to 127 as bytes, of every 8 the even ones first.
  static KVANTA_INLINE void PackEvenFirst(Lanes::F x, uint8_t* out) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    Store(_mm_shuffle_epi8(ToBytes(Lanes::RoundToInt(x)), order), out);
  }
  // 32 numbers from 0 to 255, rounded.
  static KVANTA_INLINE void PackUnsigned(Lanes::F a, Lanes::F b, uint8_t* out) {
    const Lanes::I x = Lanes::RoundToInt(a), y = Lanes::RoundToInt(b);
    const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(x.lo, x.hi), _mm256_packs_epi32(y.lo, y.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
  // -1 where x is negative, else 1.
  static KVANTA_INLINE void Signs(Lanes::F x, uint8_t* out) {
    const auto sign = [](__m256 half) {
      return _mm256_or_si256(_mm256_srai_epi32(_mm256_castps_si256(half), 31), _mm256_set1_epi32(1));
    };
    Store(ToBytes({sign(x.lo), sign(x.hi)}), out);
  }

 private:
  static KVANTA_INLINE __m128i ToBytes(Lanes::I i) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(i.lo, i.hi), _MM_SHUFFLE(3, 1, 2, 0));
    return _mm_packs_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  }
  static KVANTA_INLINE void Store(__m128i bytes, uint8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }
};

// bytes[i] = table[bytes[i]] of 16 entries; n a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int i = 0; i < n; i += 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i), _mm256_shuffle_epi8(entries, Load256(bytes + i)));
  }
}

using CodeFp32 = LaneCode<DecodeFp32>;
using CodeBf16 = LaneCode<DecodeBf16>;
using CodeFp16 = PairCode<DecodeFp16>;
using CodeE4M3 = PairCode<DecodeE4M3>;
using CodeE5M2 = PairCode<DecodeE5M2>;

}  // namespace
}  // namespace kvanta::kernels
