// Dot products with the codes of the cache on NEON; x86/codes_avx2.h describes Dot(). Floats become f32 lanes, fp8 by
// way of fp16; bytes are multiplied by sdot, udot and usdot where the unit has them (cpu/arm/dot_bytes.h).
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels/cpu/arm/dot_bytes.h"
#include "kernels/cpu/arm/vec16_neon.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
// After the Vec16.
#include "kernels/attention/cpu/byte_lanes.h"

namespace kvanta::kernels {
namespace {

// Query rows that share a loaded line: 16 registers of sums.
inline constexpr int kQueryTile = kSmallTiles ? 2 : 4;
inline constexpr int kGroupsUnroll = 1;
inline constexpr int kLinesOfStep = 2;  // lines per prefetcher step

// Line i; of a tail, the 8 valid lanes.
template <bool kTail>
KVANTA_INLINE Vec16::U LoadLine(const StridedLines& lines, int64_t i) {
  const uint8_t* line = lines.first + i * lines.stride;
  if constexpr (kTail) return {{LoadVector<U4>(line), LoadVector<U4>(line + 16), U4{}, U4{}}};
  return LoadVectors<U4, 4>(line);
}

template <class Decode>
struct LaneCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 4;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { std::memcpy(out, &x, sizeof x); }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sums[r] = Vec16::Zero();
    for (int64_t i = 0; i < lines.count; ++i) {
      if (i % 2 == 0) prefetch.Step();
      const Vec16::U words = LoadLine<kTail>(lines, i);
#pragma GCC unroll 2
      for (int s = 0; s < kSub; ++s) {
        const Vec16::F x = Each(
            [&](U4 word) __attribute__((always_inline)) { return Decode::Element(word, s); }, words);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          float c;
          std::memcpy(&c, operands[r] + (i * kSub + s) * 4, 4);
          sums[r] = Vec16::Fma(x, Vec16::Set1(c), sums[r]);
        }
      }
    }
  }
};

struct DecodeFp16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE F4 Element(U4 word, int s) {
    const uint32x4_t x = (uint32x4_t)word;
    return (F4)vcvt_f32_f16((float16x4_t)(s == 0 ? vmovn_u32(x) : vshrn_n_u32(x, 16)));
  }
};
using CodeFp16 = LaneCode<DecodeFp16>;

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
    const auto order = [](F4 y) __attribute__((always_inline)) {
      return __builtin_shufflevector(y, y, 0, 2, 1, 3);
    };
    const Vec16::F ordered = Each(order, x);
    std::memcpy(out, &ordered, sizeof ordered);
  }

  // Decodes `rows` rows of `lanes` words, a multiple of 8, each to two rows of as many words of fp16, 1 / kFactor of
  // the value.
  __attribute__((noinline)) static void Unpack(const uint8_t* from, int rows, int lanes, uint8_t* to) {
    const int64_t row_bytes = int64_t{4} * lanes;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < row_bytes; i += 16) {
        const U8 words = LoadVector<U8>(from + row * row_bytes + i);
        const U8 even = Decode::ToFp16(words << 8), odd = Decode::ToFp16(words);
        std::memcpy(to + 2 * row * row_bytes + i, &even, sizeof even);
        std::memcpy(to + (2 * row + 1) * row_bytes + i, &odd, sizeof odd);
      }
    }
  }
};

// The code is the upper byte. seeeemmm -> s0eeeemmm0000000 is fp16 of 2^-8 times the value, subnormals included, but
// for the code of NaN.
struct DecodeE4M3 {
  static constexpr float kFactor = 256;
  static KVANTA_INLINE U8 ToFp16(U8 x) {
    const U8 fp16 = (U8)((S8)x >> 1) & 0xbf80;
    return fp16 | ((U8)((fp16 & 0x7fff) == 0x3f80) & 0x7e00);
  }
};
// seeeeemm is the upper byte of an fp16.
struct DecodeE5M2 {
  static constexpr float kFactor = 1;
  static KVANTA_INLINE U8 ToFp16(U8 x) { return x & 0xff00; }
};

#if defined(__ARM_FEATURE_DOTPROD)
// Operands of 16 bits as two signed bytes, 256 high + low: [4 high][4 low] per four.
struct CodeInt8 {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 2;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    const Vec16::I i = Vec16::RoundToInt(x);
    const Vec16::I high = Each(
        [](I4 y) __attribute__((always_inline)) { return (y + 128) >> 8; }, i);
    const Vec16::I low = Each(
        [](I4 y, I4 h) __attribute__((always_inline)) { return y - (h << 8); }, i, high);
    const U4 h = Bytes(high), l = Bytes(low);
    const Vectors<U4, 2> pairs = {
        {__builtin_shufflevector(h, l, 0, 4, 1, 5), __builtin_shufflevector(h, l, 2, 6, 3, 7)}};
    std::memcpy(out, &pairs, sizeof pairs);
  }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    CombineHalves<kRows, kTail, Vectors<F4, 2>>(
        sums, [&](int first, Vectors<F4, 2>* half) __attribute__((always_inline)) {
          I4 high[2][kRows] = {}, low[2][kRows] = {};
          for (int64_t i = 0; i < lines.count; ++i) {
            if (i % 4 == 0) prefetch.Step();
            const auto words = LoadVectors<U4, 2>(lines.first + i * lines.stride + first);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              const U4 h = Broadcast(LoadWord(operands[r] + i * 8)), l = Broadcast(LoadWord(operands[r] + i * 8 + 4));
#pragma GCC unroll 2
              for (int v = 0; v < 2; ++v) {
                high[v][r] = DotSigned(high[v][r], words.v[v], h);
                low[v][r] = DotSigned(low[v][r], words.v[v], l);
              }
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const auto combined = [&](int v) __attribute__((always_inline)) {
              return __builtin_convertvector((high[v][r] << 8) + low[v][r], F4);
            };
            half[r] = {{combined(0), combined(1)}};
          }
        });
  }

 private:
  static KVANTA_INLINE U4 Bytes(Vec16::I x) {
    return (U4)kernels::PackSigned(PackShorts(x.v[0], x.v[1]), PackShorts(x.v[2], x.v[3]));
  }
};
#else
using CodeInt8 = ShortsInt8;
#endif
using CodeInt8Values = CodeInt8;

// 4 kCount lanes of 4 bytes, for subbyte_codes.h. Codes have up to 6 bits, so two products fit 16.
template <int kCount>
struct DotLanes : ByteLanes<kCount> {
  using V = Vectors<U4, kCount>;
  using Accumulator = Vectors<I4, kCount>;
  using Sum = Accumulator;
  static constexpr bool kSumsAreWide = true;

  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    const uint8x16_t entries = vld1q_u8(table);
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return (U4)vqtbl1q_u8(entries, (uint8x16_t)(y & 0x0f0f0f0fU)); }, x);
  }
  // (x & mask), with the bits of the four bytes `flips` flipped.
  static KVANTA_INLINE V AndFlip(V x, int mask, const uint8_t* flips) {
    return Flip(ByteLanes<kCount>::And(x, mask), flips);
  }
  static KVANTA_INLINE V Flip(V x, const uint8_t* flips) {
    const U4 bits = Broadcast(LoadWord(flips));
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y ^ bits; }, x);
  }
  static KVANTA_INLINE Accumulator MulAdd(Accumulator partial, V x, const uint8_t* operands) {
    const U4 c = Broadcast(LoadWord(operands));
    return Each(
        [&](I4 sum, U4 y) __attribute__((always_inline)) { return DotSmall(sum, y, c); }, partial, x);
  }
  template <bool kSmallBlocks>
  static KVANTA_INLINE V LoadProbs(const uint8_t* four, const uint8_t* /*the same*/) {
    const U4 probs = Broadcast(LoadWord(four));
    return Each(
        [&](U4) __attribute__((always_inline)) { return probs; }, V{});
  }
  static KVANTA_INLINE Accumulator MulAddSigned(Accumulator partial, V probs, V x) {
    return Each(DotMixed, partial, probs, x);
  }
  // x is not negative.
  static KVANTA_INLINE Accumulator MulAddFields(Accumulator partial, V probs, V x) {
    return Each(DotUnsigned, partial, probs, x);
  }
};

using Bytes8 = ValueLanes<DotLanes<2>>;
using ValueBytes = Bytes8;

struct Bytes16 : PackedLanes<DotLanes<4>> {
  // Sum of n signed bytes, n a multiple of 64.
  static KVANTA_INLINE int32_t SumOf(const uint8_t* bytes, int n) {
    I4 sum{};
    for (int i = 0; i < n; i += 16) sum = DotSmall(sum, LoadVector<U4>(bytes + i), Broadcast(0x01010101U));
    return vaddvq_s32((int32x4_t)sum);
  }
  // Flips for AndFlip(): `bits` where x is negative, else 0.
  static KVANTA_INLINE void StoreFlips(Vec16::F x, int bits, uint8_t* out) {
    const Vec16::I flips = Each(
        [&](F4 y) __attribute__((always_inline)) { return ((I4)y >> 31) & bits; }, x);
    const C16 bytes = kernels::PackSigned(PackShorts(flips.v[0], flips.v[1]), PackShorts(flips.v[2], flips.v[3]));
    std::memcpy(out, &bytes, sizeof bytes);
  }
  // Offsets of the codes of 64 slots: `middle`, or one less where the scale is negative.
  template <bool kSigns>
  static KVANTA_INLINE V CodeOffsets(int middle, const uint8_t* signs) {
    const U4 middles = Broadcast(static_cast<uint32_t>(middle) * 0x01010101U);
    if constexpr (!kSigns) return {{middles, middles, middles, middles}};
    const auto offsets = [&](int i) __attribute__((always_inline)) {
      return middles - (LoadVector<U4>(signs + 16 * i) & 0x01010101U);
    };
    return {{offsets(0), offsets(1), offsets(2), offsets(3)}};
  }
  // sums[i]: sum of the lanes of x[i], i < 4, or minus the sum.
  template <bool kNegative = false>
  static KVANTA_INLINE void SumsOf(const Sum* x, int32_t* sums) {
    for (int i = 0; i < 4; ++i) {
      const int32_t sum = vaddvq_s32((int32x4_t)((x[i].v[0] + x[i].v[1]) + (x[i].v[2] + x[i].v[3])));
      sums[i] = kNegative ? -sum : sum;
    }
  }
};

// bytes[i] = table[bytes[i]], 16 entries; n is a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  const int8x16_t entries = vld1q_s8(table);
  for (int i = 0; i < n; i += 16) {
    const int8x16_t levels = vqtbl1q_s8(entries, vld1q_u8(bytes + i));
    std::memcpy(bytes + i, &levels, sizeof levels);
  }
}

using CodeFp32 = LaneCode<DecodeFp32>;
using CodeBf16 = LaneCode<DecodeBf16>;
using CodeE4M3 = Fp8Code<DecodeE4M3>;
using CodeE5M2 = Fp8Code<DecodeE5M2>;

}  // namespace
}  // namespace kvanta::kernels
