// 256-bit loads, and byte operations of AVX2 on 8 lanes of 4 bytes, for subbyte_codes.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

KVANTA_INLINE __m256i Load256(const uint8_t* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}
KVANTA_INLINE __m256i BroadcastQuad(const uint8_t* four) {
  int32_t value;
  __builtin_memcpy(&value, four, 4);
  return _mm256_set1_epi32(value);
}
// Keeps a sum a chain: the compiler may reorder integer sums into trees, whose temporaries spill.
KVANTA_INLINE __m256i InOrder(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}

struct Bytes256 {
  using V = __m256i;
  static constexpr int kChannels = 16;  // channels of values in a register
  static constexpr int kUnroll = 1;
  static constexpr int kManyRows = 0;

  static KVANTA_INLINE V Load(const uint8_t* bytes) { return Load256(bytes); }
  static KVANTA_INLINE V And(V x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(mask))); }
  static KVANTA_INLINE V Or(V a, V b) { return _mm256_or_si256(a, b); }
  static KVANTA_INLINE V Right(V x, int bits) { return _mm256_srli_epi16(x, bits); }
  static KVANTA_INLINE V Left(V x, int bits) { return _mm256_slli_epi16(x, bits); }
  static KVANTA_INLINE V Sub(V x, int y) { return _mm256_sub_epi8(x, _mm256_set1_epi8(static_cast<char>(y))); }
  // (x - kMiddle) times the signs, 1 or -1, of the four bytes of a lane.
  template <int kMiddle>
  static KVANTA_INLINE V SignedSub(V x, const uint8_t* signs) {
    return _mm256_sign_epi8(Sub(x, kMiddle), BroadcastQuad(signs));
  }
  template <bool kSmallBlocks>
  static KVANTA_INLINE V LoadProbs(const uint8_t* four, const uint8_t* /*the same*/) {
    return BroadcastQuad(four);
  }
  // Looks up the lowest 4 bits of x.
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))),
                               And(x, 15));
  }
  // Loads channels [16 group, 16 group + 16) of a section of kWidth bits: two sets of 8, whose even channels are the
  // fields at bit 0 and the odd ones those at bit kWidth.
  template <int kWidth, bool kTail>
  static KVANTA_INLINE V LoadSets(const uint8_t* section, int group, int /*left: 8 of a tail*/) {
    const auto load = [](const uint8_t* word) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(word)); };
    if constexpr (kWidth == 4 && kTail)
      return _mm256_inserti128_si256(_mm256_setzero_si256(), load(section + group * 32), 0);
    if constexpr (kWidth == 4) return Load(section + group * 32);
    const int first = kWidth == 2 ? 0 : group % 2 * 4;
    const __m256i shifts = _mm256_add_epi32(
        _mm256_set1_epi32(first), _mm256_setr_epi32(0, 0, 0, 0, 2 * kWidth, 2 * kWidth, 2 * kWidth, 2 * kWidth));
    return _mm256_srlv_epi32(_mm256_broadcastsi128_si256(load(section + group * kWidth / 2 * 16)), shifts);
  }
};

}  // namespace
}  // namespace kvanta::kernels
