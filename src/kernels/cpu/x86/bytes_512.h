// Byte operations in 512-bit registers, for subbyte_codes.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/vec16_avx512.h"

namespace kvanta::kernels {
namespace {

// Shuffle that gathers 64 bytes from two registers: the first holds vectors 0 and 2 in the low two bytes of each lane,
// the second vectors 1 and 3.
struct ByteOrder {
  alignas(64) uint8_t bytes[64];
};
// Vectors in order, or of every 8 lanes the even ones first.
constexpr ByteOrder MakeOrder(bool even_first) {
  ByteOrder order{};
  for (int i = 0; i < 64; ++i) {
    const int lane = even_first ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i;
    order.bytes[i] = static_cast<uint8_t>(lane % 16 * 4 + i / 32 + i / 16 % 2 * 64);
  }
  return order;
}
constexpr ByteOrder kInOrder = MakeOrder(false), kEvenFirst = MakeOrder(true);

// 16 lanes of 4 bytes; products are added in 32 bits.
struct Bytes16 {
  using V = __m512i;
  using Accumulator = __m512i;
  using Sum = __m512i;
  static constexpr int64_t kMaxSum = int64_t{1} << 30;
  static constexpr int kChannels = 32;  // channels of values in a register
  static constexpr int kUnroll = 2;     // registers of values at a time, to hide the latency of their sums
  static constexpr int kManyRows = kSmallTiles ? 0 : 8;  // rows that hide it with one register
  // Sums have 32 bits from the first product on, so that the midpoint of codes, and the complement that a negative
  // scale makes of a code, can be subtracted from the sum instead of from each code.
  static constexpr bool kSumsAreWide = true;

  static KVANTA_INLINE V Load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static KVANTA_INLINE V And(V x, int mask) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(mask))); }
  static KVANTA_INLINE V Or(V a, V b) { return _mm512_or_si512(a, b); }
  static KVANTA_INLINE V Right(V x, int bits) { return _mm512_srli_epi16(x, static_cast<unsigned>(bits)); }
  static KVANTA_INLINE V Left(V x, int bits) { return _mm512_slli_epi16(x, static_cast<unsigned>(bits)); }
  static KVANTA_INLINE V Sub(V x, int y) { return _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(y))); }
  // x & mask, flipped where a lane has bits in `flips`.
  static KVANTA_INLINE V AndFlip(V x, int mask, const uint8_t* flips) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi8(static_cast<char>(mask)), Broadcast32(flips), 0x6a);
  }
  static KVANTA_INLINE V Flip(V x, const uint8_t* flips) { return _mm512_xor_si512(x, Broadcast32(flips)); }
  // Looks up the lowest 4 bits of x: the instruction uses 6, so the table has its entries four times.
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    return _mm512_permutexvar_epi8(x, _mm512_loadu_si512(table));
  }
  static KVANTA_INLINE Accumulator Start() { return _mm512_setzero_si512(); }
  static KVANTA_INLINE Accumulator MulAdd(Accumulator partial, V x, const uint8_t* operands) {
    return DotBytes(partial, x, Broadcast32(operands));
  }
  static KVANTA_INLINE Accumulator MulAddSigned(Accumulator partial, V probs, V x) {
    return DotBytes(partial, probs, x);
  }
  // x is not negative.
  static KVANTA_INLINE Accumulator MulAddFields(Accumulator partial, V probs, V x) {
    return MulAddSigned(partial, probs, x);
  }
  static KVANTA_INLINE Sum Set(int32_t x) { return _mm512_set1_epi32(x); }
  static KVANTA_INLINE Sum Add(Sum sum, Accumulator partial) { return _mm512_add_epi32(sum, partial); }
  static KVANTA_INLINE Vec16::F ToFloat(Sum sum) { return _mm512_cvtepi32_ps(sum); }

  // Packs 16 integers of magnitude up to 127 to bytes, of every 8 the even ones first.
  static KVANTA_INLINE void PackEvenFirst(Vec16::F x, uint8_t* out) {
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
    Store(_mm_shuffle_epi8(bytes, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)), out);
  }
  // Rounds 64 products a b from 0 to 255 to bytes; vector i of a is premultiplied by kPackFactor[i]. Adding 2^23 leaves
  // an integer in the lowest byte, or, for products times 256, in the second.
  static constexpr float kPackFactor[4] = {1, 1, 256, 256};
  static KVANTA_INLINE void PackProducts(const Vec16::F* a, const Vec16::F* b, uint8_t* out) {
    const V lowest = _mm512_set1_epi32(0xff);
    V pairs[2];
    for (int i = 0; i < 2; ++i) {
      const Vec16::F low = Vec16::Fma(a[i], b[i], Vec16::Set1(0x1p23f));
      const Vec16::F high = Vec16::Fma(a[i + 2], b[i + 2], Vec16::Set1(0x1p23f + 128));
      // lowest ? low : high
      pairs[i] = _mm512_ternarylogic_epi32(_mm512_castps_si512(low), _mm512_castps_si512(high), lowest, 0xe4);
    }
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(pairs[0], _mm512_load_si512(kInOrder.bytes), pairs[1]));
  }
  // Rounds 64 products x * inverse of magnitude up to 127 to bytes in the order of PackEvenFirst().
  static KVANTA_INLINE void PackSigned(const float* x, float inverse, uint8_t* out) {
    const Vec16::F scale = Vec16::Set1(inverse), upper = Vec16::Set1(inverse * 256);
    const V lowest = _mm512_set1_epi32(0xff);
    V pairs[2];
    for (int i = 0; i < 2; ++i) {
      const Vec16::F low = Vec16::Fma(Vec16::Load(x + 16 * i), scale, Vec16::Set1(0x1.8p23f));
      const Vec16::F high = Vec16::Fma(Vec16::Load(x + 16 * i + 32), upper, Vec16::Set1(0x1.8p23f + 128));
      pairs[i] = _mm512_ternarylogic_epi32(_mm512_castps_si512(low), _mm512_castps_si512(high), lowest, 0xe4);
    }
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(pairs[0], _mm512_load_si512(kEvenFirst.bytes), pairs[1]));
  }
  // Sum of n signed bytes, n a multiple of 64.
  static KVANTA_INLINE int32_t SumOf(const uint8_t* bytes, int n) {
    V sums = Start();
    for (int i = 0; i < n; i += 64) sums = DotBytes(sums, _mm512_set1_epi8(1), Load(bytes + i));
    return _mm512_reduce_add_epi32(sums);
  }
  // Flips for AndFlip(): `bits` where x is negative, else 0.
  static KVANTA_INLINE void StoreFlips(Vec16::F x, int bits, uint8_t* out) {
    const __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
    Store(_mm_maskz_mov_epi8(negative, _mm_set1_epi8(static_cast<char>(bits))), out);
  }
#ifndef KVANTA_EMULATE_AVX512  // its small tiles do without
  // StoreFlips() of four vectors, as 64 bytes for AndFlip().
  static KVANTA_INLINE void StoreFlips64(const Vec16::F* x, int bits, uint8_t* out) {
    const auto mask = [x](int i) { return _mm512_movepi32_mask(_mm512_castps_si512(x[i])); };
    const __mmask32 low = _mm512_kunpackw(mask(1), mask(0)), high = _mm512_kunpackw(mask(3), mask(2));
    _mm512_storeu_si512(out,
                        _mm512_maskz_mov_epi8(_mm512_kunpackd(high, low), _mm512_set1_epi8(static_cast<char>(bits))));
  }
#endif
  // Offsets of the codes of 64 slots: `middle`, a power of 2, or one less where the scale is negative.
  template <bool kSigns>
  static KVANTA_INLINE V CodeOffsets(int middle, const uint8_t* signs) {
    const V middles = _mm512_set1_epi8(static_cast<char>(middle));
    if constexpr (!kSigns) return middles;
    return _mm512_xor_si512(middles, Load(signs));  // m ^ (2 m - 1) = m - 1
  }
  // sums[i]: sum of the lanes of x[i], i < 4, or minus the sum.
  template <bool kNegative = false>
  static KVANTA_INLINE void SumsOf(const V* x, int32_t* sums) {
    const V a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const V b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const V quarters = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64(quarters, 1));
    const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), kNegative ? _mm_sub_epi32(_mm_setzero_si128(), all) : all);
  }

  // Loads channels [32 group, 32 group + 32) of a section of kWidth bits: four sets of 8, whose even channels are the
  // fields at bit 0 and the odd ones those at bit kWidth. Of a tail `left` channels are read.
  template <int kWidth, bool kTail>
  static KVANTA_INLINE V LoadSets(const uint8_t* section, int group, int left) {
    const uint8_t* word = section + group * kWidth * 16;
    if constexpr (kWidth == 4) {
      return kTail ? _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << (left / 2)) - 1U), word) : Load(word);
    }
    if constexpr (kWidth == 2) {
      V twice = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(word)));  // a tail has 16
      if constexpr (!kTail) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(word));
        twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(words));
      }
      return _mm512_srlv_epi32(twice, _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4));
    }
    const V four = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(word)));
    return _mm512_srlv_epi32(four, _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6));
  }
  // Four probabilities for all lanes, or, where blocks are small, `second` for the upper 16 channels.
  template <bool kSmallBlocks>
  static KVANTA_INLINE V LoadProbs(const uint8_t* first, const uint8_t* second) {
    const V x = Broadcast32(first);
    if constexpr (!kSmallBlocks) return x;
    int32_t upper;
    __builtin_memcpy(&upper, second, sizeof upper);
    return _mm512_mask_set1_epi32(x, 0xff00, upper);
  }
  static KVANTA_INLINE void Interleave(Sum even, Sum odd, Vec16::F* out) {
    Interleave(ToFloat(even), ToFloat(odd), out);
  }
  static KVANTA_INLINE void Interleave(Vec16::F even, Vec16::F odd, Vec16::F* out) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    out[0] = _mm512_permutex2var_ps(even, first, odd);
    out[1] = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
  }

 private:
  static KVANTA_INLINE void Store(__m128i bytes, uint8_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
  }
};

}  // namespace
}  // namespace kvanta::kernels
