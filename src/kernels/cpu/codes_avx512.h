// The codes of the cache on AVX-512. What Dot() computes is described in codes_avx2.h. bf16 and fp8 (by exact byte
// tables) become f32 lanes for multiply-adds; integers ride vpdpbusd with coefficients split into two signed bytes, so
// that nothing is lost beyond the 16 bits that every ISA keeps.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/lanes_avx512.h"
#include "kernels/cpu/line_run.h"
#include "kernels/cpu/prefetcher.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kQueryTile = kSmallTiles ? 2 : 4;
inline constexpr int kRunsBeside = 2;

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Lanes::F KeepOr(Lanes::F x, float other, int begin, int end) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 in = static_cast<__mmask16>(_mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                                              _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end)));
  return _mm512_mask_blend_ps(in, _mm512_set1_ps(other), x);
}

// Line `i` of the v-th run beside the first; lanes that there are not are 0.
template <bool kTail>
KVANTA_INLINE __m512i LoadLine(const LineRun& run, int64_t i, int v) {
  const uint8_t* line = run.lines + i * run.stride + v * run.beside;
  if constexpr (!kTail) return _mm512_loadu_si512(line);
  const int left = run.left - 16 * v;
  const unsigned lanes = left >= 16 ? 16U : left > 0 ? static_cast<unsigned>(left) : 0U;
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << lanes) - 1U), line);
}
// f(line): for every line of a run, two lines a prefetch.
template <class F>
KVANTA_INLINE void ForLines(const LineRun& run, Prefetcher& prefetch, F f) {
  int64_t i = 0;
  for (; i + 2 <= run.count; i += 2) {
    prefetch.Step();
    f(i);
    f(i + 1);
  }
  if (i < run.count) f(i);
}

KVANTA_INLINE __m512 BroadcastFloat(const uint8_t* bytes) {
  float value;
  __builtin_memcpy(&value, bytes, sizeof value);
  return _mm512_set1_ps(value);
}

// fp32 and fp16: one f32 lane per element of a unit.
template <class Decode>
struct LaneCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { _mm512_storeu_ps(out, x); }

  template <int kBeside, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const LineRun& run, const uint8_t* const* coefficients, const int32_t* /*bias*/,
                                Lanes::F* sums, Prefetcher& prefetch) {
    for (int i = 0; i < kRows * kBeside; ++i) sums[i] = Lanes::Zero();
    ForLines(
        run, prefetch, [&](int64_t i) __attribute__((always_inline)) {
#pragma GCC unroll 2
          for (int v = 0; v < kBeside; ++v) {
            const __m512i units = LoadLine<kTail>(run, i, v);
#pragma GCC unroll 2
            for (int s = 0; s < kSub; ++s) {
              const __m512 x = Decode::Element(units, s);
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                __m512& sum = sums[r * kBeside + v];
                sum = _mm512_fmadd_ps(x, BroadcastFloat(coefficients[r] + (i * kSub + s) * 4), sum);
              }
            }
          }
        });
  }
};

struct DecodeFp32 {
  static constexpr int kSub = 1;
  static KVANTA_INLINE __m512 Element(__m512i units, int /*s*/) { return _mm512_castsi512_ps(units); }
};

struct DecodeFp16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE __m512 Element(__m512i units, int s) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(s == 0 ? units : _mm512_srli_epi32(units, 16)));
  }
};

// bf16 and fp8 as pairs of bf16 in a lane, which shifts and masks make f32 of. vdpbf16ps would multiply pairs, but with
// two terms for every f32 coefficient, and takes four times as long as a multiply-add on some CPUs.
template <class Decode>
struct PairCode {
  static constexpr int kRuns = Decode::kPairs == 1 ? kRunsBeside : 1;  // more would not fit into the registers
  static constexpr int kSub = 2 * Decode::kPairs;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 4;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { _mm512_storeu_ps(out, x); }

  template <int kBeside, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const LineRun& run, const uint8_t* const* coefficients, const int32_t* /*bias*/,
                                Lanes::F* sums, Prefetcher& prefetch) {
    const Decode decode;
    __m512 low[kRows * kBeside], high[kRows * kBeside];  // two chains a row: one would wait for itself
    for (int i = 0; i < kRows * kBeside; ++i) low[i] = high[i] = _mm512_setzero_ps();
    ForLines(
        run, prefetch, [&](int64_t i) __attribute__((always_inline)) {
          __m512i pairs[kBeside][Decode::kPairs];
          for (int v = 0; v < kBeside; ++v) {
            decode.Pairs(LoadLine<kTail>(run, i, v), pairs[v]);
          }
#pragma GCC unroll 2
          for (int pair = 0; pair < Decode::kPairs; ++pair) {
            __m512 x[kBeside], y[kBeside];
            for (int v = 0; v < kBeside; ++v) {
              x[v] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[v][pair], 16));
              y[v] = _mm512_castsi512_ps(_mm512_and_si512(pairs[v][pair], _mm512_set1_epi32(-0x10000)));
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              const uint8_t* c = coefficients[r] + (i * kSub + pair) * 4;
              const __m512 first = BroadcastFloat(c), second = BroadcastFloat(c + 4 * Decode::kPairs);
              for (int v = 0; v < kBeside; ++v) {
                low[r * kBeside + v] = _mm512_fmadd_ps(x[v], first, low[r * kBeside + v]);
                high[r * kBeside + v] = _mm512_fmadd_ps(y[v], second, high[r * kBeside + v]);
              }
            }
          }
        });
    for (int i = 0; i < kRows * kBeside; ++i) sums[i] = _mm512_add_ps(low[i], high[i]);
  }
};

struct DecodeBf16 {
  static constexpr int kPairs = 1;
  KVANTA_INLINE void Pairs(__m512i units, __m512i* pairs) const { pairs[0] = units; }
};

// Lower and upper bytes of the bf16 of each code's magnitude.
struct ByteTables {
  uint8_t low[128];
  uint8_t high[128];
};
// A code of `mantissa` mantissa bits and exponent bias `bias`; magnitudes from `special` on are NaN (or infinite).
constexpr ByteTables MakeTables(int mantissa, int bias, int special, int infinity) {
  ByteTables tables{};
  for (int code = 0; code < 128; ++code) {
    int exponent = code >> mantissa;
    int fraction = code & ((1 << mantissa) - 1);
    uint32_t bits = 0;
    if (code >= special) {
      bits = code == infinity ? 0x7f80 : 0x7fc0;
    } else if (code != 0) {
      if (exponent == 0) {  // subnormal: shift the leading one out of the fraction
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

// 64 codes by two table look-ups of 7 bits each: exact, subnormals and NaN included.
template <const ByteTables& kTables>
struct DecodeFp8 {
  static constexpr int kPairs = 2;
  __m512i low0 = _mm512_load_si512(kTables.low), low1 = _mm512_load_si512(kTables.low + 64);
  __m512i high0 = _mm512_load_si512(kTables.high), high1 = _mm512_load_si512(kTables.high + 64);

  KVANTA_INLINE void Pairs(__m512i units, __m512i* pairs) const {
    const __m512i low = _mm512_permutex2var_epi8(low0, units, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, units, high1);
    high = _mm512_ternarylogic_epi32(high, units, _mm512_set1_epi8(-128), 0xf8);  // high | (units & sign)
    const __m512i even = _mm512_set1_epi16(0xff);
    pairs[0] = _mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, even, 0xf8);  // a | (b & c)
    pairs[1] = _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, even, 0xf4);  // a | (b & ~c)
  }
};

// 16 integers up to 65535 as [4 high bytes][4 low bytes] per four, unsigned.
KVANTA_INLINE void PackUnsignedBytes(Lanes::F x, uint8_t* out) {
  const __m512i order =
      _mm512_castsi256_si512(_mm256_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 17, 21, 25, 29, 16, 20, 24, 28, 33, 37, 41, 45,
                                              32, 36, 40, 44, 49, 53, 57, 61, 48, 52, 56, 60));
  const __m512i bytes = _mm512_permutexvar_epi8(order, _mm512_cvtps_epi32(x));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(bytes));
}
// 16 integers of magnitude up to 32512 as [4 high bytes][4 low bytes] per four: x = 256 high + low, both signed.
KVANTA_INLINE void PackBytes(Lanes::F x, __m128i shuffle, uint8_t* out) {
  const __m512i i = _mm512_cvtps_epi32(x);
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(i, _mm512_set1_epi32(128)), 8);
  const __m512i low = _mm512_sub_epi32(i, _mm512_slli_epi32(high, 8));
  const __m128i h = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(high), shuffle);
  const __m128i l = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(low), shuffle);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi32(h, l));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi32(h, l));
}
KVANTA_INLINE __m512 JoinTerms(__m512i high, __m512i low) {
  return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}

// Codes + 128 are the unsigned operand; the bias takes 128 * sum(coefficients) off again.
struct CodeInt8 {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 128;
  static constexpr int kCoefficientBytes = 2;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) {
    PackBytes(x, _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), out);
  }

  template <int kBeside, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const LineRun& run, const uint8_t* const* coefficients, const int32_t* bias,
                                Lanes::F* sums, Prefetcher& prefetch) {
    __m512i high[kRows * kBeside], low[kRows * kBeside];
    for (int i = 0; i < kRows * kBeside; ++i) {
      high[i] = _mm512_setzero_si512();
      low[i] = _mm512_set1_epi32(bias[i / kBeside]);
    }
    ForLines(
        run, prefetch, [&](int64_t i) __attribute__((always_inline)) {
          __m512i codes[kBeside];
          for (int v = 0; v < kBeside; ++v) {
            codes[v] = _mm512_xor_si512(LoadLine<kTail>(run, i, v), _mm512_set1_epi8(-128));
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m512i first = Broadcast32(coefficients[r] + i * 8),
                          second = Broadcast32(coefficients[r] + i * 8 + 4);
            for (int v = 0; v < kBeside; ++v) {
              high[r * kBeside + v] = DotBytes(high[r * kBeside + v], codes[v], first);
              low[r * kBeside + v] = DotBytes(low[r * kBeside + v], codes[v], second);
            }
          }
        });
    for (int i = 0; i < kRows * kBeside; ++i) sums[i] = JoinTerms(high[i], low[i]);
  }
};

// Where the bytes of four vectors of lanes lie in two: of vectors 0 and 2, then 1 and 3, the lowest two bytes of a
// lane.
struct ByteOrder {
  alignas(64) uint8_t bytes[64];
};
// One vector after the other, or of every 8 lanes the even ones first.
constexpr ByteOrder MakeOrder(bool even_first) {
  ByteOrder order{};
  for (int i = 0; i < 64; ++i) {
    const int lane = even_first ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i;
    order.bytes[i] = static_cast<uint8_t>(lane % 16 * 4 + i / 32 + i / 16 % 2 * 64);
  }
  return order;
}
constexpr ByteOrder kInOrder = MakeOrder(false), kEvenFirst = MakeOrder(true);

// Of values, whose weights are not negative: these are the unsigned operand, and the codes stay as they are.
struct CodeInt8Values {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 0;
  static constexpr int kCoefficientBytes = 2;
  static constexpr float kLargest = 65535;

  static KVANTA_INLINE void Pack(Lanes::F x, uint8_t* out) { PackUnsignedBytes(x, out); }

  template <int kBeside, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const LineRun& run, const uint8_t* const* coefficients, const int32_t* /*bias*/,
                                Lanes::F* sums, Prefetcher& prefetch) {
    __m512i high[kRows * kBeside], low[kRows * kBeside];
    for (int i = 0; i < kRows * kBeside; ++i) high[i] = low[i] = _mm512_setzero_si512();
    ForLines(
        run, prefetch, [&](int64_t i) __attribute__((always_inline)) {
          __m512i codes[kBeside];
          for (int v = 0; v < kBeside; ++v) codes[v] = LoadLine<kTail>(run, i, v);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const __m512i first = Broadcast32(coefficients[r] + i * 8),
                          second = Broadcast32(coefficients[r] + i * 8 + 4);
            for (int v = 0; v < kBeside; ++v) {
              high[r * kBeside + v] = DotBytes(high[r * kBeside + v], first, codes[v]);
              low[r * kBeside + v] = DotBytes(low[r * kBeside + v], second, codes[v]);
            }
          }
        });
    for (int i = 0; i < kRows * kBeside; ++i) sums[i] = JoinTerms(high[i], low[i]);
  }
};

// 16 lanes of 4 bytes, for codes_narrow.h: products are added in 32 bits.
struct Bytes16 {
  using V = __m512i;
  using Run = __m512i;
  using Sum = __m512i;
  static constexpr int64_t kLargestSum = int64_t{1} << 30;
  static constexpr int kChannels = 32;  // whose values one register holds
  static constexpr int kBeside = 2;     // registers of values at a time: one would wait for its sums
  // Sums are 32 bits wide from the first product on, so that what codes are to be met less, and the complement of a
  // code that a negative scale makes, can be taken off the sum.
  static constexpr bool kSumsAreWide = true;

  static KVANTA_INLINE V Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static KVANTA_INLINE V And(V x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask))); }
  static KVANTA_INLINE V Or(V a, V b) { return _mm512_or_si512(a, b); }
  static KVANTA_INLINE V Right(V x, int bits) { return _mm512_srli_epi16(x, static_cast<unsigned>(bits)); }
  static KVANTA_INLINE V Left(V x, int bits) { return _mm512_slli_epi16(x, static_cast<unsigned>(bits)); }
  static KVANTA_INLINE V Sub(V x, int y) { return _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(y))); }
  // x & mask, whose bits are flipped where a lane has them in `flips`.
  static KVANTA_INLINE V AndFlip(V x, int mask, const uint8_t* flips) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi8(static_cast<char>(mask)), Broadcast32(flips), 0x6a);
  }
  static KVANTA_INLINE V Flip(V x, const uint8_t* flips) { return _mm512_xor_si512(x, Broadcast32(flips)); }
  // By the lowest 4 bits of x: the table has its entries four times, and the instruction looks at 6.
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    return _mm512_permutexvar_epi8(x, _mm512_loadu_si512(table));
  }
  static KVANTA_INLINE Run Start() { return _mm512_setzero_si512(); }
  static KVANTA_INLINE Run MulAdd(Run run, V x, const uint8_t* coefficients) {
    return DotBytes(run, x, Broadcast32(coefficients));
  }
  static KVANTA_INLINE Run MulAddSigned(Run run, V weights, V x) { return DotBytes(run, weights, x); }
  static KVANTA_INLINE Sum Set(int32_t x) { return _mm512_set1_epi32(x); }
  static KVANTA_INLINE Sum Widen(Run run) { return run; }
  static KVANTA_INLINE Sum Add(Sum sum, Run run) { return _mm512_add_epi32(sum, run); }
  static KVANTA_INLINE Sum Plus(Sum sum, int32_t x) { return _mm512_add_epi32(sum, _mm512_set1_epi32(x)); }
  static KVANTA_INLINE Lanes::F ToFloat(Sum sum) { return _mm512_cvtepi32_ps(sum); }

  // 16 integers of magnitude up to 127 as bytes, of every 8 the even ones first.
  static KVANTA_INLINE void PackEvenFirst(Lanes::F x, uint8_t* out) {
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    Store(_mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)), out);
  }
  // 64 products a b from 0 to 255, rounded to bytes; of a, the i-th vector is kPackFactor[i] times what it stands for.
  // Adding 2^23 leaves an integer in the lowest byte, or, of products times 256, in the second.
  static constexpr float kPackFactor[4] = {1, 1, 256, 256};
  static KVANTA_INLINE void PackProducts(const Lanes::F* a, const Lanes::F* b, uint8_t* out) {
    const V lowest = _mm512_set1_epi32(0xff);
    V pairs[2];
    for (int i = 0; i < 2; ++i) {
      const Lanes::F low = Lanes::Fma(a[i], b[i], Lanes::Set1(0x1p23f));
      const Lanes::F high = Lanes::Fma(a[i + 2], b[i + 2], Lanes::Set1(0x1p23f + 128));
      // lowest ? low : high
      pairs[i] = _mm512_ternarylogic_epi32(_mm512_castps_si512(low), _mm512_castps_si512(high), lowest, 0xe4);
    }
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(pairs[0], _mm512_load_si512(kInOrder.bytes), pairs[1]));
  }
  // 64 numbers x inverse of magnitude up to 127, rounded to bytes in the order of PackEvenFirst().
  static KVANTA_INLINE void PackSigned(const float* x, float inverse, uint8_t* out) {
    const Lanes::F unit = Lanes::Set1(inverse), upper = Lanes::Set1(inverse * 256);
    const V lowest = _mm512_set1_epi32(0xff);
    V pairs[2];
    for (int i = 0; i < 2; ++i) {
      const Lanes::F low = Lanes::Fma(Lanes::Load(x + 16 * i), unit, Lanes::Set1(0x1.8p23f));
      const Lanes::F high = Lanes::Fma(Lanes::Load(x + 16 * i + 32), upper, Lanes::Set1(0x1.8p23f + 128));
      pairs[i] = _mm512_ternarylogic_epi32(_mm512_castps_si512(low), _mm512_castps_si512(high), lowest, 0xe4);
    }
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(pairs[0], _mm512_load_si512(kEvenFirst.bytes), pairs[1]));
  }
  // The sum of n signed bytes, n a multiple of 64.
  static KVANTA_INLINE int32_t SumOf(const uint8_t* bytes, int n) {
    V sums = Start();
    for (int i = 0; i < n; i += 64) sums = DotBytes(sums, _mm512_set1_epi8(1), Load(bytes + i));
    return _mm512_reduce_add_epi32(sums);
  }
  // What AndFlip() takes for a sign: `bits` where x is negative, else 0.
  static KVANTA_INLINE void Signs(Lanes::F x, int bits, uint8_t* out) {
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    Store(_mm_maskz_mov_epi8(negative, _mm_set1_epi8(static_cast<char>(bits))), out);
  }
  // What the codes of up to 64 slots are to be met less: `middle`, one less where there is a sign; 0 behind them.
  template <bool kSigns>
  static KVANTA_INLINE V Offsets(int middle, const uint8_t* signs, int slots) {
    const __mmask64 in = slots >= 64 ? ~uint64_t{0} : (uint64_t{1} << static_cast<unsigned>(slots)) - 1;
    const V middles = _mm512_maskz_mov_epi8(in, _mm512_set1_epi8(static_cast<char>(middle)));
    if constexpr (!kSigns) return middles;
    return _mm512_mask_sub_epi8(middles, in, middles, And(Load(signs), 1));
  }
  // sums[i]: of the lanes of x[i], i < 4.
  static KVANTA_INLINE void SumsOf(const V* x, int32_t* sums) {
    const V a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const V b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const V quarters = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64(quarters, 1));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), all);
  }

  // Channels [32 group, 32 group + 32) of a plane of kWidth bits, four sets of 8 whose even channels are the fields at
  // bit 0 and the odd ones those at bit kWidth. Of a tail `left` channels are read.
  template <int kWidth, bool kTail>
  static KVANTA_INLINE V LoadSets(const uint8_t* plane, int group, int left) {
    const uint8_t* unit = plane + group * kWidth * 16;
    if constexpr (kWidth == 4) {
      return kTail ? _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << (left / 2)) - 1U), unit) : Load(unit);
    }
    if constexpr (kWidth == 2) {
      V twice = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit)));  // 16 of a tail
      if constexpr (!kTail) {
        const __m256i units = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit));
        twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(units));
      }
      return _mm512_srlv_epi32(twice, _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4));
    }
    const V four = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(unit)));
    return _mm512_srlv_epi32(four, _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6));
  }
  // Four weights for all lanes, or, where blocks are small, `second` for the upper 16 channels.
  template <bool kSmallBlocks>
  static KVANTA_INLINE V Weights(const uint8_t* first, const uint8_t* second) {
    const V x = Broadcast32(first);
    if constexpr (!kSmallBlocks) return x;
    int32_t upper;
    __builtin_memcpy(&upper, second, sizeof upper);
    return _mm512_mask_set1_epi32(x, 0xff00, upper);
  }
  static KVANTA_INLINE void Interleave(Sum even, Sum odd, Lanes::F* out) {
    const Lanes::F e = ToFloat(even), o = ToFloat(odd);
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    out[0] = _mm512_permutex2var_ps(e, first, o);
    out[1] = _mm512_permutex2var_ps(e, _mm512_add_epi32(first, _mm512_set1_epi32(8)), o);
  }

 private:
  static KVANTA_INLINE void Store(__m128i bytes, uint8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }
};

using ValueBytes = Bytes16;

// bytes[i] = table[bytes[i]] of 16 entries; n a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (int i = 0; i < n; i += 32) {
    const __m256i fields = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i), _mm256_shuffle_epi8(entries, fields));
  }
}

using CodeFp32 = LaneCode<DecodeFp32>;
using CodeFp16 = LaneCode<DecodeFp16>;
using CodeBf16 = PairCode<DecodeBf16>;
using CodeE4M3 = PairCode<DecodeFp8<kE4M3Tables>>;
using CodeE5M2 = PairCode<DecodeFp8<kE5M2Tables>>;

}  // namespace
}  // namespace kvanta::kernels
