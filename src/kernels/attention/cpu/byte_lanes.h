// Codes of the cache in compiler vectors, for the portable and the NEON units: byte operations for subbyte_codes.h,
// int8 as 16-bit lanes, decoders of fp32 and bf16. Included by codes_<isa>.h after the unit's Vec16.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
#include "kernels/cpu/vectors_portable.h"

namespace kvanta::kernels {
namespace {

// x where begin <= lane < end, else `other`.
KVANTA_INLINE Vec16::F SelectRange(Vec16::F x, float other, int begin, int end) {
  constexpr Vec16::I lanes = {{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}};
  return Each(
      [&](F4 value, I4 lane)
          __attribute__((always_inline)) { return ((lane >= begin) & (lane < end)) ? value : Broadcast(other); },
      x, lanes);
}

// Computes sums of 16 lanes, or of the first 8 (kTail), by calling half(byte offset in a line, Vectors<_, 2>* sums) per
// 8 lanes.
template <int kRows, bool kTail, class Sums, class Half>
KVANTA_INLINE void CombineHalves(Vec16::F* sums, Half half) {
  Sums of_half[kRows];
  half(0, of_half);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sums[r] = {{of_half[r].v[0], of_half[r].v[1], F4{}, F4{}}};
  if constexpr (kTail) return;
  half(32, of_half);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) sums[r].v[2] = of_half[r].v[0], sums[r].v[3] = of_half[r].v[1];
}

struct DecodeFp32 {
  static constexpr int kSub = 1;
  static KVANTA_INLINE F4 Element(U4 word, int) { return (F4)word; }
};
struct DecodeBf16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE F4 Element(U4 word, int s) { return (F4)(s == 0 ? word << 16 : word & 0xffff0000U); }
};

// Operands in pairs (0, 2), (1, 3): shifts extract the even and the odd bytes of a word.
struct ShortsInt8 {
  static constexpr int kSub = 4;
  static constexpr bool kInteger = true;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 2;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    const Vec16::I i = Vec16::RoundToInt(x);
    const S8 a = PackShorts(i.v[0], i.v[1]), b = PackShorts(i.v[2], i.v[3]);
    const Vectors<S8, 2> pairs = {{__builtin_shufflevector(a, a, 0, 2, 1, 3, 4, 6, 5, 7),  //
                                   __builtin_shufflevector(b, b, 0, 2, 1, 3, 4, 6, 5, 7)}};
    std::memcpy(out, &pairs, sizeof pairs);
  }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    CombineHalves<kRows, kTail, Vectors<F4, 2>>(
        sums, [&](int first, Vectors<F4, 2>* half) __attribute__((always_inline)) {
          I4 low[kRows], high[kRows];
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) low[r] = high[r] = I4{};
          for (int64_t i = 0; i < lines.count; ++i) {
            if (i % 4 == 0) prefetch.Step();
            const auto words = LoadVectors<U4, 2>(lines.first + i * lines.stride + first);
            const S8 a02 = SignedEvenBytes(words.v[0]), a13 = SignedOddBytes(words.v[0]);
            const S8 b02 = SignedEvenBytes(words.v[1]), b13 = SignedOddBytes(words.v[1]);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
              const S8 c02 = (S8)Broadcast(LoadWord(operands[r] + i * 8));
              const S8 c13 = (S8)Broadcast(LoadWord(operands[r] + i * 8 + 4));
              low[r] = AddProducts(AddProducts(low[r], a02, c02), a13, c13);
              high[r] = AddProducts(AddProducts(high[r], b02, c02), b13, c13);
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            half[r] = {{__builtin_convertvector(low[r], F4), __builtin_convertvector(high[r], F4)}};
          }
        });
  }
};
// 4 kCount lanes of 4 bytes, for subbyte_codes.h.
template <int kCount>
struct ByteLanes {
  using V = Vectors<U4, kCount>;
  using Accumulator = Vectors<I4, kCount>;
  using Sum = Accumulator;
  static constexpr int64_t kMaxSum = int64_t{1} << 30;
  static constexpr bool kSumsAreWide = false;  // the other form needs no less work here

  static KVANTA_INLINE V Load(const uint8_t* p) { return LoadVectors<U4, kCount>(p); }
  static KVANTA_INLINE V And(V x, int mask) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y & (static_cast<uint32_t>(mask) * 0x01010101U); }, x);
  }
  static KVANTA_INLINE V Or(V a, V b) { return a | b; }
  static KVANTA_INLINE V Right(V x, int bits) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y >> bits; }, x);
  }
  static KVANTA_INLINE V Left(V x, int bits) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y << bits; }, x);
  }
  static KVANTA_INLINE V Sub(V x, int y) {
    return Each(
        [&](U4 z) __attribute__((always_inline)) { return (U4)((B16)z - static_cast<uint8_t>(y)); }, x);
  }
  // (x - kMiddle) times the signs, 1 or -1, of the four bytes of a lane.
  template <int kMiddle>
  static KVANTA_INLINE V SignedSub(V x, const uint8_t* signs) {
    const B16 negative = (B16)((C16)Broadcast(LoadWord(signs)) < 0);
    return Each(
        [&](U4 y) __attribute__((always_inline)) {
          return (U4)((((B16)y - static_cast<uint8_t>(kMiddle)) ^ negative) - negative);
        },
        x);
  }
  // Looks up the lowest 4 bits of x in an e2m1 table of levels from table[0] on. There is no byte shuffle in portable
  // code, but the magnitudes 0 1 2 3 4 6 8 12 take three comparisons.
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) {
          const C16 code = (C16)(y & 0x0f0f0f0fU), magnitude = code & 7;
          const C16 level = magnitude - (magnitude > 4) - (magnitude > 5) + ((magnitude > 6) & 3);
          const C16 negative = code > 7;
          return (U4)(((level ^ negative) - negative) + static_cast<int8_t>(table[0]));
        },
        x);
  }
  static KVANTA_INLINE Accumulator Start() { return {}; }
  static KVANTA_INLINE Accumulator MulAdd(Accumulator partial, V x, const uint8_t* operands) {
    return AddBytes<false>(partial, x, SignedBytes(operands));
  }
  template <bool kSmallBlocks>
  static KVANTA_INLINE FourBytes LoadProbs(const uint8_t* four, const uint8_t* /*the same*/) {
    return UnsignedBytes(four);
  }
  static KVANTA_INLINE Accumulator MulAddSigned(Accumulator partial, FourBytes probs, V x) {
    return AddBytes<true>(partial, x, probs);
  }
  static KVANTA_INLINE Sum Set(int32_t x) { return Plus({}, x); }
  static KVANTA_INLINE Sum Widen(Accumulator partial) { return partial; }
  static KVANTA_INLINE Sum Add(Sum sum, Accumulator partial) { return sum + partial; }
  static KVANTA_INLINE Sum Plus(Sum sum, int32_t x) {
    return Each(
        [&](I4 y) __attribute__((always_inline)) { return y + x; }, sum);
  }
};

// 8 lanes of values: two registers.
template <class Base>
struct ValueLanes : Base {
  using V = typename Base::V;
  using Sum = typename Base::Sum;
  static constexpr int kChannels = 16;
  static constexpr int kUnroll = 1;
  static constexpr int kManyRows = 0;

  // As Bytes256::LoadSets (x86/bytes_256.h).
  template <int kWidth, bool kTail>
  static KVANTA_INLINE V LoadSets(const uint8_t* section, int group, int /*left*/) {
    if constexpr (kWidth == 4) {
      const U4 low = LoadVector<U4>(section + group * 32);
      if constexpr (kTail) return {{low, U4{}}};
      return {{low, LoadVector<U4>(section + group * 32 + 16)}};
    }
    const U4 word = LoadVector<U4>(section + group * kWidth / 2 * 16);
    const int first = kWidth == 2 ? 0 : group % 2 * 4;
    return {{word >> first, word >> (first + 2 * kWidth)}};
  }
  static KVANTA_INLINE void Interleave(Sum even, Sum odd, Vec16::F* out) {
    const auto low = [](I4 a, I4 b) __attribute__((always_inline)) {
      return __builtin_convertvector((I4)__builtin_shufflevector(a, b, 0, 4, 1, 5), F4);
    };
    const auto high = [](I4 a, I4 b) __attribute__((always_inline)) {
      return __builtin_convertvector((I4)__builtin_shufflevector(a, b, 2, 6, 3, 7), F4);
    };
    *out = {{low(even.v[0], odd.v[0]), high(even.v[0], odd.v[0]), low(even.v[1], odd.v[1]), high(even.v[1], odd.v[1])}};
  }
};
// 16 lanes of keys or of packed bytes: four registers.
template <class Base>
struct PackedLanes : Base {
  using Sum = typename Base::Sum;

  static KVANTA_INLINE Vec16::F ToFloat(Sum sum) { return Vec16::FromInt(sum); }
  // Rounds 64 products a b from 0 to 255 to bytes, saturating; vector i of a is premultiplied by kPackFactor[i].
  static constexpr float kPackFactor[4] = {1, 1, 1, 1};
  static KVANTA_INLINE void PackProducts(const Vec16::F* a, const Vec16::F* b, uint8_t* out) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vectors<S8, 2> x = ToShorts(Vec16::Mul(a[i], b[i]));
      const B16 bytes = PackUnsigned(x.v[0], x.v[1]);
      std::memcpy(out + 16 * i, &bytes, sizeof bytes);
    }
  }
  // Rounds 64 products x * inverse of magnitude up to 127 to bytes in the order of PackEvenFirst().
  static KVANTA_INLINE void PackSigned(const float* x, float inverse, uint8_t* out) {
    for (int i = 0; i < 64; i += 16) PackEvenFirst(Vec16::Mul(Vec16::Load(x + i), Vec16::Set1(inverse)), out + i);
  }
  // Sum of n signed bytes, n a multiple of 64.
  static KVANTA_INLINE int32_t SumOf(const uint8_t* bytes, int n) {
    Sum sums{};
    for (int i = 0; i < n; i += 64) sums = AddBytes<true>(sums, Base::Load(bytes + i), {S8{} + 1, S8{} + 1});
    const I4 sum = (sums.v[0] + sums.v[1]) + (sums.v[2] + sums.v[3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  // -1 where x is negative, else 1.
  static KVANTA_INLINE void StoreFlips(Vec16::F x, int /*bits*/, uint8_t* out) {
    const Vec16::I sign = Each(
        [](F4 y) __attribute__((always_inline)) { return ((I4)y >> 31) | 1; }, x);
    const C16 bytes = kernels::PackSigned(PackShorts(sign.v[0], sign.v[1]), PackShorts(sign.v[2], sign.v[3]));
    std::memcpy(out, &bytes, sizeof bytes);
  }
  // Packs 16 integers of magnitude up to 127 to bytes, of every 8 the even ones first.
  static KVANTA_INLINE void PackEvenFirst(Vec16::F x, uint8_t* out) {
    const Vectors<S8, 2> shorts = ToShorts(x);
    const S8 a = shorts.v[0], b = shorts.v[1];
    const C16 bytes = kernels::PackSigned(__builtin_shufflevector(a, a, 0, 2, 4, 6, 1, 3, 5, 7),
                                          __builtin_shufflevector(b, b, 0, 2, 4, 6, 1, 3, 5, 7));
    std::memcpy(out, &bytes, sizeof bytes);
  }

 private:
  static KVANTA_INLINE Vectors<S8, 2> ToShorts(Vec16::F x) {
    const Vec16::I i = Vec16::RoundToInt(x);
    return {{PackShorts(i.v[0], i.v[1]), PackShorts(i.v[2], i.v[3])}};
  }
};

}  // namespace
}  // namespace kvanta::kernels
