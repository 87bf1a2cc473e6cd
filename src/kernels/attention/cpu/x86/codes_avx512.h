// Dot products with the codes of the cache on AVX-512; codes_avx2.h describes Dot(). bf16 and fp8 become f32
// lanes (fp8 by exact byte tables) for multiply-adds; bf16_dots_avx512.h multiplies both by bf16. Integers are
// multiplied by vpdpbusd with operands split into two signed bytes, which keeps the 16 bits that operands have on every
// ISA.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
#include "kernels/cpu/x86/bytes_512.h"
#include "kernels/cpu/x86/vec16_avx512.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kQueryTile = kSmallTiles ? 2 : 4;
inline constexpr int kGroupsUnroll = 2;

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Vec16::F SelectRange(Vec16::F x, float other, int begin, int end) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 in = static_cast<__mmask16>(_mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                                              _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end)));
  return _mm512_mask_blend_ps(in, _mm512_set1_ps(other), x);
}

// Loads line i of the v-th group of 16 lanes; invalid lanes are 0.
template <bool kTail>
KVANTA_INLINE __m512i LoadLine(const StridedLines& lines, int64_t i, int v) {
  const uint8_t* line = lines.first + i * lines.stride + v * lines.unroll_stride;
  if constexpr (!kTail) return _mm512_loadu_si512(line);
  const int left = lines.left - 16 * v;
  const unsigned lanes = left >= 16 ? 16U : left > 0 ? static_cast<unsigned>(left) : 0U;
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << lanes) - 1U), line);
}
inline constexpr int kLinesOfStep = 1;  // lines per prefetcher step

// Calls f(line) for every line, with a prefetcher step for each though every branch costs: prefetching two adjacent
// lines at once keeps the hardware prefetcher from running ahead, and bf16 from memory takes 10 % longer.
template <class F>
KVANTA_INLINE void ForLines(const StridedLines& lines, Prefetcher& prefetch, F f) {
  int64_t i = 0;
  for (; i + 2 <= lines.count; i += 2) {
    prefetch.Step();
    f(i);
    prefetch.Step();
    f(i + 1);
  }
  if (i < lines.count) f(i);
}

KVANTA_INLINE __m512 BroadcastFloat(const uint8_t* bytes) {
  float value;
  __builtin_memcpy(&value, bytes, sizeof value);
  return _mm512_set1_ps(value);
}

// Codes that become f32 lanes, one per element of a word: Decode splits a line of words, then converts element by
// element.
template <class Decode>
struct LaneCode {
  static constexpr int kManyRows = kSmallTiles ? 0 : 8;  // 16 sums fit in the registers
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 4;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { _mm512_storeu_ps(out, x); }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    const Decode decode;
    __m512 sum[kRows * kUnroll];
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kUnroll; ++i) sum[i] = _mm512_setzero_ps();
    ForLines(
        lines, prefetch, [&](int64_t i) __attribute__((always_inline)) {
          typename Decode::Line line[kUnroll];
          for (int v = 0; v < kUnroll; ++v) line[v] = decode.Split(LoadLine<kTail>(lines, i, v));
#pragma GCC unroll 4
          for (int s = 0; s < kSub; ++s) {
            __m512 x[kUnroll];
            for (int v = 0; v < kUnroll; ++v) x[v] = Decode::Element(line[v], s);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
              const __m512 operand = BroadcastFloat(operands[r] + (i * kSub + s) * 4);
              for (int v = 0; v < kUnroll; ++v) {
                sum[r * kUnroll + v] = _mm512_fmadd_ps(x[v], operand, sum[r * kUnroll + v]);
              }
            }
          }
        });
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kUnroll; ++i) sums[i] = sum[i];
  }
};

struct DecodeFp32 {
  using Line = __m512i;
  static constexpr int kSub = 1;
  static KVANTA_INLINE Line Split(__m512i words) { return words; }
  static KVANTA_INLINE __m512 Element(Line words, int /*s*/) { return _mm512_castsi512_ps(words); }
};

struct DecodeFp16 {
  using Line = __m512i;
  static constexpr int kSub = 2;
  static KVANTA_INLINE Line Split(__m512i words) { return words; }
  static KVANTA_INLINE __m512 Element(Line words, int s) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(s == 0 ? words : _mm512_srli_epi32(words, 16)));
  }
};

using CodeFp32 = LaneCode<DecodeFp32>;

// Words as Decode's pairs of bf16, which shifts and masks convert to f32.
template <class Decode>
struct SplitPairs {
  struct Line {
    __m512i pairs[Decode::kPairs];
  };
  static constexpr int kSub = 2 * Decode::kPairs;
  Decode decode;

  KVANTA_INLINE Line Split(__m512i words) const {
    Line line;
    decode.Pairs(words, line.pairs);
    return line;
  }
  static KVANTA_INLINE __m512 Element(const Line& line, int s) {
    const __m512i pair = line.pairs[s % Decode::kPairs];
    return _mm512_castsi512_ps(s < Decode::kPairs ? _mm512_slli_epi32(pair, 16)
                                                  : _mm512_and_si512(pair, _mm512_set1_epi32(-0x10000)));
  }
};

// bf16 and fp8. vdpbf16ps would multiply pairs, but needs two terms for every f32 operand and takes four times as long
// as a multiply-add on Intel's (ADRs 0014, 0068).
template <class Decode>
struct PairCode : LaneCode<SplitPairs<Decode>> {
  using Expanded = CodeFp32;  // sums in the same order

  // Stores the elements of `count` lines of 16 words, in f32: element s of line i at out + s * stride + 64 i.
  static KVANTA_INLINE void Expand(const uint8_t* lines, int count, uint8_t* out, int64_t stride) {
    using Pairs = SplitPairs<Decode>;
    const Pairs split;
    for (int i = 0; i < count; ++i, lines += 64, out += 64) {
      const typename Pairs::Line line = split.Split(_mm512_loadu_si512(lines));
#pragma GCC unroll 4
      for (int s = 0; s < Pairs::kSub; ++s) _mm512_store_ps(out + s * stride, Pairs::Element(line, s));
    }
  }
};

struct DecodeBf16 {
  static constexpr int kPairs = 1;
  KVANTA_INLINE void Pairs(__m512i words, __m512i* pairs) const { pairs[0] = words; }
};

// Low and high bytes of the bf16 of each code's magnitude.
struct ByteTables {
  uint8_t low[128];
  uint8_t high[128];
};
// Tables of a code with `mantissa` mantissa bits and exponent bias `bias`; magnitudes from `special` on are NaN or
// infinite.
constexpr ByteTables MakeTables(int mantissa, int bias, int special, int infinity) {
  ByteTables tables{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> mantissa;
    int fraction = code & ((1 << mantissa) - 1);
    uint32_t bits = 0;
    if (code >= special) {
      bits = code == infinity ? 0x7f80 : 0x7fc0;
    } else if (code != 0) {
      if (exponent == 0) {  // subnormal: normalize the fraction
        exponent = 1;
        while ((fraction >> mantissa) == 0) {
          fraction <<= 1;
          --exponent;
        }
        fraction &= (1 << mantissa) - 1;
      }
      bits = static_cast<uint32_t>(((exponent - bias + 127) << 7) | (fraction << (7 - mantissa)));
    }
    tables.low[code] = static_cast<uint8_t>(bits & 0xff);
    tables.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return tables;
}
alignas(64) constexpr ByteTables kE4M3Tables = MakeTables(3, 7, 0x7f, -1);
alignas(64) constexpr ByteTables kE5M2Tables = MakeTables(2, 15, 0x7c, 0x7c);

// Decodes 64 codes by two table look-ups of 7 bits each: exact, subnormals and NaN included.
template <const ByteTables& kTables>
struct DecodeFp8 {
  static constexpr int kPairs = 2;
  __m512i low0 = _mm512_load_si512(kTables.low), low1 = _mm512_load_si512(kTables.low + 64);
  __m512i high0 = _mm512_load_si512(kTables.high), high1 = _mm512_load_si512(kTables.high + 64);

  KVANTA_INLINE void Pairs(__m512i words, __m512i* pairs) const {
    const __m512i low = _mm512_permutex2var_epi8(low0, words, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, words, high1);
    high = _mm512_ternarylogic_epi32(high, words, _mm512_set1_epi8(-128), 0xf8);  // high | (words & sign)
    const __m512i even = _mm512_set1_epi16(0xff);
    pairs[0] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, even, 0xf8);  // a | (b & c)
    pairs[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, even, 0xf4);  // a | (b & ~c)
  }
};

// Packs 16 integers up to 65535 as [4 high bytes][4 low bytes] per four, unsigned.
KVANTA_INLINE void PackUnsignedBytes(Vec16::F x, uint8_t* out) {
  const __m512i order =
      _mm512_castsi256_si512(_mm256_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 17, 21, 25, 29, 16, 20, 24, 28, 33, 37, 41, 45,
                                              32, 36, 40, 44, 49, 53, 57, 61, 48, 52, 56, 60));
  const __m512i bytes = _mm512_permutexvar_epi8(order, _mm512_cvtps_epi32(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(bytes));
}
// Packs 16 integers of magnitude up to 32512 as [4 high bytes][4 low bytes] per four: x = 256 high + low, both signed.
KVANTA_INLINE void PackBytes(Vec16::F x, __m128i shuffle, uint8_t* out) {
  const __m512i i = _mm512_cvtps_epi32(x);
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(128)), 8);
  const __m512i low = _mm512_sub_epi32(i, _mm512_slli_epi32(high, 8));
  const __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), shuffle);
  const __m128i l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), shuffle);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi32(h, l));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi32(h, l));
}
KVANTA_INLINE __m512 CombineTerms(__m512i high, __m512i low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

// Packs 16 integers as bytes.
KVANTA_INLINE void PackLowBytes(Vec16::F x, uint8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

// Sums of dot products of lines of bytes with kRows rows of operands of one or two bytes, the upper one first; kUnroll
// lines at a time. bias: initial values of the rows' sums, where codes have an offset.
template <class Decoder, int kUnroll, int kRows>
struct ByteSums {
  static constexpr bool kTwoTerms = Decoder::kOperandBytes == 2;

  explicit KVANTA_INLINE ByteSums(const int32_t* bias) {
    for (int i = 0; i < kRows * kUnroll; ++i) {
      high[i] = _mm512_setzero_si512();
      low[i] = Decoder::kOffset != 0 ? _mm512_set1_epi32(bias[i / kUnroll]) : _mm512_setzero_si512();
    }
  }

  // Adds the products of a line's codes [kUnroll], with their offset.
  KVANTA_INLINE void Add(const uint8_t* const* operands, int64_t line, const __m512i* codes) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const uint8_t* four = operands[r] + line * (4 * Decoder::kOperandBytes);
      if constexpr (kTwoTerms) {
        const __m512i first = Broadcast32(four), second = Broadcast32(four + 4);
        for (int v = 0; v < kUnroll; ++v) {
          high[r * kUnroll + v] = Decoder::MulAdd(high[r * kUnroll + v], codes[v], first);
          low[r * kUnroll + v] = Decoder::MulAdd(low[r * kUnroll + v], codes[v], second);
        }
      } else {
        const __m512i operand = Broadcast32(four);
        for (int v = 0; v < kUnroll; ++v) {
          low[r * kUnroll + v] = Decoder::MulAdd(low[r * kUnroll + v], codes[v], operand);
        }
      }
    }
  }

  KVANTA_INLINE void Store(Vec16::F* sums) const {
    for (int i = 0; i < kRows * kUnroll; ++i) {
      sums[i] = kTwoTerms ? CombineTerms(high[i], low[i]) : _mm512_cvtepi32_ps(low[i]);
    }
  }

  __m512i high[kRows * kUnroll], low[kRows * kUnroll];
};

template <class Decoder>
struct ByteCode {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* bias,
                                Vec16::F* sums, Prefetcher& prefetch) {
    ByteSums<Decoder, kUnroll, kRows> products(bias);
    ForLines(
        lines, prefetch, [&](int64_t i) __attribute__((always_inline)) {
          __m512i codes[kUnroll];
          for (int v = 0; v < kUnroll; ++v) codes[v] = Decoder::AddOffset(LoadLine<kTail>(lines, i, v));
          products.Add(operands, i, codes);
        });
    products.Store(sums);
  }
};

// Keys: codes + 128 are the unsigned operand of vpdpbusd; the bias subtracts 128 * sum(operands).
struct ByteKeys {
  static constexpr int kOffset = 128;
  static KVANTA_INLINE __m512i MulAdd(__m512i sum, __m512i codes, __m512i operands) {
    return DotBytes(sum, codes, operands);
  }
};
struct CodeInt8 : ByteCode<CodeInt8>, ByteKeys {
  static constexpr int kOperandBytes = 2;
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    PackBytes(x, _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), out);
  }
  static KVANTA_INLINE __m512i AddOffset(__m512i line) { return _mm512_xor_si512(line, _mm512_set1_epi8(-128)); }
};
// 8-bit operands; stored with the offset.
struct CodeInt8x8 : ByteCode<CodeInt8x8>, ByteKeys {
  static constexpr int kOperandBytes = 1;
  static constexpr float kMaxOperand = kMaxByteQuery;
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { PackLowBytes(x, out); }
  static KVANTA_INLINE __m512i AddOffset(__m512i line) { return line; }
};

// Values: the scaled probabilities are not negative, so they are the unsigned operand and the codes the signed one.
struct ByteValues {
  static constexpr int kOffset = 0;
  static KVANTA_INLINE __m512i AddOffset(__m512i line) { return line; }
  static KVANTA_INLINE __m512i MulAdd(__m512i sum, __m512i codes, __m512i operands) {
    return DotBytes(sum, operands, codes);
  }
};
struct CodeInt8Values : ByteCode<CodeInt8Values>, ByteValues {
  static constexpr int kOperandBytes = 2;
  static constexpr float kMaxOperand = 65535;
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { PackUnsignedBytes(x, out); }
};
struct CodeInt8x8Values : ByteCode<CodeInt8x8Values>, ByteValues {
  static constexpr int kOperandBytes = 1;
  static constexpr float kMaxOperand = kMaxByteProb;
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { PackLowBytes(x, out); }
};

using ValueBytes = Bytes16;

// bytes[i] = table[bytes[i]], 16 entries; n is a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int i = 0; i < n; i += 32) {
    const __m256i fields = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i), _mm256_shuffle_epi8(entries, fields));
  }
}

// Codes that no format scales by blocks (HasBlockScales()): kernels of them have no code for it.
template <class Decoder>
struct WithoutBlockScales : Decoder {
  static constexpr bool kHasBlockScales = false;
};

using CodeFp16 = WithoutBlockScales<LaneCode<DecodeFp16>>;
using CodeBf16 = WithoutBlockScales<PairCode<DecodeBf16>>;
using CodeE4M3 = PairCode<DecodeFp8<kE4M3Tables>>;
using CodeE5M2 = PairCode<DecodeFp8<kE5M2Tables>>;

}  // namespace
}  // namespace kvanta::kernels
