// Dot products with the codes of the cache on AVX2: float codes become f32 lanes for FMA, integer codes 16-bit lanes
// for vpmaddwd.
//
// A word is the 4 bytes of a lane, holding kSub elements; a line is one word of each of 16 lanes. Dot() sums element *
// operand over `count` lines `stride` bytes apart, where a row's operands are packed in the order of the words. For K a
// lane is a token and the operands are the query; for V a lane is a channel and they are p times the scales.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
#include "kernels/cpu/x86/bytes_256.h"
#include "kernels/cpu/x86/vec16_avx2.h"

namespace kvanta::kernels {
namespace {

// Query rows that share a loaded line: 8 sums leave registers for decoding.
inline constexpr int kQueryTile = kSmallTiles ? 2 : 4;
inline constexpr int kGroupsUnroll = 1;
inline constexpr int kLinesOfStep = 2;  // lines per prefetcher step

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Vec16::F SelectRange(Vec16::F x, float other, int begin, int end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const auto keep = [&](__m256 value, int offset) {
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin - offset), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(end - 1 - offset)));
    return _mm256_blendv_ps(value, _mm256_set1_ps(other), _mm256_castsi256_ps(out));
  };
  return {keep(x.lo, 0), keep(x.hi, 8)};
}

KVANTA_INLINE void Store256(__m256i x, uint8_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), x);
}
KVANTA_INLINE __m256 Broadcast32(const uint8_t* bytes) {
  return _mm256_broadcast_ss(reinterpret_cast<const float*>(bytes));
}
KVANTA_INLINE __m256 Broadcast64(const uint8_t* bytes) {
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(bytes)));
}

// fp32 and bf16: one f32 lane per element of a word.
template <class Decode>
struct LaneCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 4;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { Vec16::Store(reinterpret_cast<float*>(out), x); }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    __m256 lo[kRows], hi[kRows];
    for (int r = 0; r < kRows; ++r) lo[r] = hi[r] = _mm256_setzero_ps();
    for (int64_t i = 0; i < lines.count; ++i) {
      if (i % 2 == 0) prefetch.Step();
      const __m256i a = Load256(lines.first + i * lines.stride);
      const __m256i b = kTail ? _mm256_setzero_si256() : Load256(lines.first + i * lines.stride + 32);
#pragma GCC unroll 2
      for (int s = 0; s < kSub; ++s) {
        const __m256 x = Decode::Element(a, s);
        const __m256 y = kTail ? _mm256_setzero_ps() : Decode::Element(b, s);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256 c = Broadcast32(operands[r] + (i * kSub + s) * 4);
          lo[r] = _mm256_fmadd_ps(x, c, lo[r]);
          if (!kTail) hi[r] = _mm256_fmadd_ps(y, c, hi[r]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r] = {lo[r], hi[r]};
  }
};

struct DecodeFp32 {
  static constexpr int kSub = 1;
  static KVANTA_INLINE __m256 Element(__m256i word, int) { return _mm256_castsi256_ps(word); }
};
struct DecodeBf16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE __m256 Element(__m256i word, int element) {
    return _mm256_castsi256_ps(element == 0 ? _mm256_slli_epi32(word, 16)
                                            : _mm256_and_si256(word, _mm256_set1_epi32(-0x10000)));
  }
};

// fp16, by F16C: vcvtph2ps, twice as fast from memory as from a register, yields pairs of adjacent elements, so a sum
// is kept as the two halves of a pair and added horizontally at the end. 8 lanes at a time: 2 sums per row.
struct CodeFp16 {
  static constexpr int kSub = 2;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 4;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { Vec16::Store(reinterpret_cast<float*>(out), x); }

  template <int kRows>
  static KVANTA_INLINE void DotHalf(const uint8_t* lines, int64_t stride, int count, const uint8_t* const* operands,
                                    __m256* sums, Prefetcher& prefetch) {
    __m256 low[kRows], high[kRows];
    for (int r = 0; r < kRows; ++r) low[r] = high[r] = _mm256_setzero_ps();
    const auto add = [&](int64_t i) {
      const __m128i* words = reinterpret_cast<const __m128i*>(lines + i * stride);
      const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(words));
      const __m256 y = _mm256_cvtph_ps(_mm_loadu_si128(words + 1));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 c = Broadcast64(operands[r] + i * 8);
        low[r] = _mm256_fmadd_ps(x, c, low[r]);
        high[r] = _mm256_fmadd_ps(y, c, high[r]);
      }
    };
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
      if (i % 4 == 0) prefetch.Step();
      add(i);
      add(i + 1);
    }
    if (i < count) add(i);
    for (int r = 0; r < kRows; ++r) {
      sums[r] = _mm256_castpd_ps(
          _mm256_permute4x64_pd(_mm256_castps_pd(_mm256_hadd_ps(low[r], high[r])), _MM_SHUFFLE(3, 1, 2, 0)));
    }
  }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    __m256 half[kRows];
    DotHalf<kRows>(lines.first, lines.stride, lines.count, operands, half, prefetch);
    for (int r = 0; r < kRows; ++r) sums[r] = {half[r], _mm256_setzero_ps()};
    if (kTail) return;
    DotHalf<kRows>(lines.first + 32, lines.stride, lines.count, operands, half, prefetch);
    for (int r = 0; r < kRows; ++r) sums[r].hi = half[r];
  }
};

// fp8 is decoded to fp16 first (fp8_as_fp16.h): each word of 4 elements to two words, elements 0 and 2, then 1 and 3,
// the order in which shifts extract them.
template <class Decode>
struct Fp8Code {
  using Fp16Code = CodeFp16;
  static constexpr int kSub = 4;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 4;
  static constexpr float kFactor = Decode::kFactor;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    x.lo = _mm256_permute_ps(x.lo, _MM_SHUFFLE(3, 1, 2, 0));
    x.hi = _mm256_permute_ps(x.hi, _MM_SHUFFLE(3, 1, 2, 0));
    Vec16::Store(reinterpret_cast<float*>(out), x);
  }

  // Decodes `rows` rows of `lanes` words, a multiple of 8, each to two rows of as many words of fp16, 1 / kFactor of
  // the value.
  __attribute__((noinline)) static void Unpack(const uint8_t* from, int rows, int lanes, uint8_t* to) {
    const int64_t row_bytes = int64_t{4} * lanes;
    __m256i max = _mm256_setzero_si256();
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < row_bytes; i += 32) {
        const __m256i word = Load256(from + row * row_bytes + i);
        if (Decode::kNan != 0) max = _mm256_max_epu8(max, _mm256_and_si256(word, _mm256_set1_epi8(0x7f)));
        Store256(Decode::ToFp16(word, 0), to + 2 * row * row_bytes + i);
        Store256(Decode::ToFp16(word, 1), to + (2 * row + 1) * row_bytes + i);
      }
    }
    if (Decode::kNan == 0) return;
    const __m256i code = _mm256_set1_epi8(Decode::kNan);
    if (_mm256_testz_si256(_mm256_cmpeq_epi8(max, code), code)) return;
    for (int64_t i = 0; i < 2 * rows * row_bytes; i += 32) {
      const __m256i fp16 = Load256(to + i);
      const __m256i nan =
          _mm256_cmpeq_epi16(_mm256_and_si256(fp16, _mm256_set1_epi16(0x7fff)), _mm256_set1_epi16(Decode::kNan << 7));
      Store256(_mm256_or_si256(fp16, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00))), to + i);
    }
  }
};

// seeeemmm -> s0eeeemmm0000000 is fp16 of 2^-8 times the value, subnormals included. The NaN code 0x7f would decode to
// a number and is patched afterwards.
struct DecodeE4M3 {
  static constexpr char kNan = 0x7f;
  static constexpr float kFactor = 256;
  static KVANTA_INLINE __m256i ToFp16(__m256i word, int pair) {
    const __m256i top = pair == 0 ? _mm256_slli_epi16(word, 8) : word;
    return _mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(-0x4080));  // 0xbf80
  }
};
// seeeeemm is the upper byte of an fp16.
struct DecodeE5M2 {
  static constexpr char kNan = 0;
  static constexpr float kFactor = 1;
  static KVANTA_INLINE __m256i ToFp16(__m256i word, int pair) {
    return pair == 0 ? _mm256_slli_epi16(word, 8) : _mm256_and_si256(word, _mm256_set1_epi16(-0x100));
  }
};

// Packs 16 integers of magnitude up to 32512 to 16-bit lanes, then in the order of `shuffle` within each 128 bits.
KVANTA_INLINE void PackInt16(Vec16::F x, __m128i shuffle, uint8_t* out) {
  const Vec16::I i = Vec16::RoundToInt(x);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(i.lo, i.hi), _MM_SHUFFLE(3, 1, 2, 0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_shuffle_epi8(packed, _mm256_broadcastsi128_si256(shuffle)));
}
KVANTA_INLINE void AddProducts(__m256i a, __m256i b, __m256i& sum) {
  sum = InOrder(_mm256_add_epi32(sum, _mm256_madd_epi16(a, b)));
}
KVANTA_INLINE __m256 ToFloat(__m256i x) {
  return _mm256_cvtepi32_ps(x);
}

// Operands in pairs (0, 2), (1, 3): shifts extract the even and the odd bytes of a word.
struct CodeInt8 {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 2;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    PackInt16(x, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15), out);
  }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    __m256i lo[kRows], hi[kRows];
    for (int r = 0; r < kRows; ++r) lo[r] = hi[r] = _mm256_setzero_si256();
    const auto add = [&](int64_t i) __attribute__((always_inline)) {
      const __m256i a = Load256(lines.first + i * lines.stride);
      const __m256i b = kTail ? _mm256_setzero_si256() : Load256(lines.first + i * lines.stride + 32);
      const __m256i a02 = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), a13 = _mm256_srai_epi16(a, 8);
      const __m256i b02 = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b13 = _mm256_srai_epi16(b, 8);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256i c02 = BroadcastQuad(operands[r] + i * 8), c13 = BroadcastQuad(operands[r] + i * 8 + 4);
        AddProducts(a02, c02, lo[r]);
        AddProducts(a13, c13, lo[r]);
        if (!kTail) {
          AddProducts(b02, c02, hi[r]);
          AddProducts(b13, c13, hi[r]);
        }
      }
    };
    int64_t i = 0;
    for (; i + 2 <= lines.count; i += 2) {
      prefetch.Step();
      add(i);
      add(i + 1);
    }
    if (i < lines.count) add(i);
    for (int r = 0; r < kRows; ++r) sums[r] = {ToFloat(lo[r]), ToFloat(hi[r])};
  }
};
using CodeInt8Values = CodeInt8;

// 8 lanes of 4 bytes, for subbyte_codes.h. Products of unsigned and signed bytes are added in pairs of 16 bits.
struct Bytes8 : Bytes256 {
  using Accumulator = __m256i;  // 16-bit sums
  using Sum = __m256i;
  static constexpr int64_t kMaxSum = 32767;
  static constexpr bool kSumsAreWide = false;

  static KVANTA_INLINE Accumulator Start() { return _mm256_setzero_si256(); }
  // Keeps the additions a chain: the compiler may reorder integer sums into trees, whose temporaries spill.
  static KVANTA_INLINE Accumulator AddInPlace(Accumulator partial, __m256i x) {
    __asm__("vpaddw %1, %0, %0" : "+x"(partial) : "x"(x));
    return partial;
  }
  static KVANTA_INLINE Accumulator MulAddSigned(Accumulator partial, V probs, V x) {
    return AddInPlace(partial, _mm256_maddubs_epi16(probs, x));
  }
  static KVANTA_INLINE Sum Set(int32_t x) { return _mm256_set1_epi32(x); }
  static KVANTA_INLINE Sum Widen(Accumulator partial) { return _mm256_madd_epi16(partial, _mm256_set1_epi16(1)); }
  static KVANTA_INLINE Sum Add(Sum sum, Accumulator partial) { return _mm256_add_epi32(sum, Widen(partial)); }
  static KVANTA_INLINE void Interleave(Sum even, Sum odd, Vec16::F* out) {
    const __m256 e = ToFloat(even), o = ToFloat(odd);
    const __m256 a = _mm256_unpacklo_ps(e, o), b = _mm256_unpackhi_ps(e, o);
    *out = {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
  }
};
using ValueBytes = Bytes8;

// 16 lanes of 4 bytes.
struct Bytes16 {
  struct V {
    __m256i lo, hi;
  };
  using Accumulator = V;
  using Sum = V;
  static constexpr int64_t kMaxSum = Bytes8::kMaxSum;
  static constexpr bool kSumsAreWide = false;

  static KVANTA_INLINE V Load(const uint8_t* p) { return {Load256(p), Load256(p + 32)}; }
  static KVANTA_INLINE V And(V x, int mask) { return {Bytes8::And(x.lo, mask), Bytes8::And(x.hi, mask)}; }
  static KVANTA_INLINE V Or(V a, V b) { return {Bytes8::Or(a.lo, b.lo), Bytes8::Or(a.hi, b.hi)}; }
  static KVANTA_INLINE V Right(V x, int bits) { return {Bytes8::Right(x.lo, bits), Bytes8::Right(x.hi, bits)}; }
  static KVANTA_INLINE V Left(V x, int bits) { return {Bytes8::Left(x.lo, bits), Bytes8::Left(x.hi, bits)}; }
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    return {Bytes8::LookUp(x.lo, table), Bytes8::LookUp(x.hi, table)};
  }
  static KVANTA_INLINE Accumulator Start() { return {Bytes8::Start(), Bytes8::Start()}; }
  static KVANTA_INLINE Accumulator MulAdd(Accumulator partial, V x, const uint8_t* operands) {
    const __m256i c = BroadcastQuad(operands);
    return {Bytes8::AddInPlace(partial.lo, _mm256_maddubs_epi16(x.lo, c)),
            Bytes8::AddInPlace(partial.hi, _mm256_maddubs_epi16(x.hi, c))};
  }
  static KVANTA_INLINE Sum Widen(Accumulator partial) { return {Bytes8::Widen(partial.lo), Bytes8::Widen(partial.hi)}; }
  static KVANTA_INLINE Sum Add(Sum sum, Accumulator partial) {
    return {Bytes8::Add(sum.lo, partial.lo), Bytes8::Add(sum.hi, partial.hi)};
  }
  static KVANTA_INLINE Sum Plus(Sum sum, int32_t x) {
    const __m256i all = _mm256_set1_epi32(x);
    return {_mm256_add_epi32(sum.lo, all), _mm256_add_epi32(sum.hi, all)};
  }
  static KVANTA_INLINE Vec16::F ToFloat(Sum sum) { return {kernels::ToFloat(sum.lo), kernels::ToFloat(sum.hi)}; }

  // Packs 16 integers of magnitude up to 127 to bytes, of every 8 the even ones first.
  static KVANTA_INLINE void PackEvenFirst(Vec16::F x, uint8_t* out) {
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    Store(_mm_shuffle_epi8(ToBytes(Vec16::RoundToInt(x)), order), out);
  }
  // Rounds 64 products a b from 0 to 255 to bytes; vector i of a is premultiplied by kPackFactor[i].
  static constexpr float kPackFactor[4] = {1, 1, 1, 1};
  static KVANTA_INLINE void PackProducts(const Vec16::F* a, const Vec16::F* b, uint8_t* out) {
    for (int i = 0; i < 4; i += 2) {
      const Vec16::I x = Vec16::RoundToInt(Vec16::Mul(a[i], b[i]));
      const Vec16::I y = Vec16::RoundToInt(Vec16::Mul(a[i + 1], b[i + 1]));
      const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(x.lo, x.hi), _mm256_packs_epi32(y.lo, y.hi));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16 * i),
                          _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    }
  }
  // Rounds 64 products x * inverse of magnitude up to 127 to bytes in the order of PackEvenFirst().
  static KVANTA_INLINE void PackSigned(const float* x, float inverse, uint8_t* out) {
    for (int i = 0; i < 64; i += 16) PackEvenFirst(Vec16::Mul(Vec16::Load(x + i), Vec16::Set1(inverse)), out + i);
  }
  // Sum of n signed bytes, n a multiple of 64.
  static KVANTA_INLINE int32_t SumOf(const uint8_t* bytes, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += static_cast<int8_t>(bytes[i]);
    return sum;
  }
  // -1 where x is negative, else 1.
  static KVANTA_INLINE void StoreFlips(Vec16::F x, int /*bits*/, uint8_t* out) {
    const auto sign = [](__m256 half) {
      return _mm256_or_si256(_mm256_srai_epi32(_mm256_castps_si256(half), 31), _mm256_set1_epi32(1));
    };
    Store(ToBytes({sign(x.lo), sign(x.hi)}), out);
  }

 private:
  static KVANTA_INLINE __m128i ToBytes(Vec16::I i) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(i.lo, i.hi), _MM_SHUFFLE(3, 1, 2, 0));
    return _mm_packs_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  }
  static KVANTA_INLINE void Store(__m128i bytes, uint8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }
};

// bytes[i] = table[bytes[i]], 16 entries; n is a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int i = 0; i < n; i += 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i), _mm256_shuffle_epi8(entries, Load256(bytes + i)));
  }
}

using CodeFp32 = LaneCode<DecodeFp32>;
using CodeBf16 = LaneCode<DecodeBf16>;
using CodeE4M3 = Fp8Code<DecodeE4M3>;
using CodeE5M2 = Fp8Code<DecodeE5M2>;

}  // namespace
}  // namespace kvanta::kernels
