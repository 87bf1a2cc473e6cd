// Trellis codes on AVX-512 VBMI: a qword holds the string of 8 codes of a token, vpmultishiftqb takes their windows,
// and two look-ups of 128 entries their levels. The search has 32 windows to a register.
#pragma once

#include <cstdint>

#include "formats/trellis_levels.h"
#include "formats/trellis_search.h"
#include "kernels/attention/cpu/trellis_tables.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/vec16_avx512.h"

namespace kvanta::kernels {
namespace {

// Bytes [64] of a permutation, f(i) the source of byte i.
struct BytePermutation {
  alignas(64) uint8_t bytes[64];
};
template <class F>
constexpr BytePermutation MakeBytePermutation(F f) {
  BytePermutation permutation{};
  for (int i = 0; i < 64; ++i) permutation.bytes[i] = static_cast<uint8_t>(f(i));
  return permutation;
}
struct WordPermutation {
  alignas(64) int32_t words[16];
};
template <class F>
constexpr WordPermutation MakeWordPermutation(F f) {
  WordPermutation permutation{};
  for (int i = 0; i < 16; ++i) permutation.words[i] = f(i);
  return permutation;
}

template <int kBits>
struct TrellisLevelLookup {
  static constexpr formats::TrellisLevelTable kTable = formats::kTrellisLevels[kBits - formats::kMinTrellisBits];
  __m512i tables[4];

  KVANTA_INLINE TrellisLevelLookup() {
    for (int i = 0; i < 4; ++i) tables[i] = _mm512_load_si512(kTable.levels + 64 * i);
  }
  KVANTA_INLINE __m512i operator()(__m512i windows) const {
    const __m512i low = _mm512_permutex2var_epi8(tables[0], windows, tables[1]);
    const __m512i high = _mm512_permutex2var_epi8(tables[2], windows, tables[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(windows), high);
  }
};

template <int kBits>
struct TrellisCodes {
  // The windows of 8 codes that begin at bit `first` of each qword.
  static KVANTA_INLINE __m512i Windows(int first) {
    uint64_t shifts = 0;
    for (int i = 0; i < 8; ++i) shifts |= static_cast<uint64_t>(first + kBits * i) << (8 * i);
    return _mm512_set1_epi64(static_cast<int64_t>(shifts));
  }

  // Decodes a group of 16 tokens to the order of int8 keys: [head_dim / 4][16 tokens][4].
  static void UnpackKeys(const uint8_t* group, int head_dim, uint8_t* out) {
    static constexpr WordPermutation kPairs = MakeWordPermutation([](int i) { return i / 2 + i % 2 * 16; });
    static constexpr WordPermutation kEven = MakeWordPermutation([](int i) { return 2 * i; });
    const TrellisLevelLookup<kBits> levels;
    const __m512i pairs = _mm512_load_si512(kPairs.words);
    const __m512i upper_pairs = _mm512_add_epi32(pairs, _mm512_set1_epi32(8));
    const __m512i even = _mm512_load_si512(kEven.words);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const int units = head_dim * kBits / 32;  // words of a row, 64 bytes apart
    for (int octet = 0; octet < head_dim / 8; ++octet, out += 128) {
      const int unit = octet * kBits / 4, next = unit + 1 < units ? unit + 1 : 0;
      const __m512i words = _mm512_loadu_si512(group + unit * 64), more = _mm512_loadu_si512(group + next * 64);
      const __m512i windows = Windows(octet * kBits % 4 * 8);
      const __m512i low = levels(_mm512_multishift_epi64_epi8(windows, _mm512_permutex2var_epi32(words, pairs, more)));
      const __m512i high =
          levels(_mm512_multishift_epi64_epi8(windows, _mm512_permutex2var_epi32(words, upper_pairs, more)));
      _mm512_storeu_si512(out, _mm512_permutex2var_epi32(low, even, high));
      _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi32(low, odd, high));
    }
  }

  // Decodes tokens [4 quad, 4 end_quad) of a cell, to their places in the order of int8 values: [quad][head_dim][4].
  static void UnpackValues(const uint8_t* codes, int head_dim, int quad, int end_quad, uint8_t* out) {
    // Qword 4 o + t: bytes kBits o to kBits (o + 1) of token t.
    static constexpr BytePermutation kStrings = MakeBytePermutation([](int i) {
      const int byte = kBits * (i / 32) + i % 8;
      return byte <= 2 * kBits ? 4 * byte + i / 8 % 4 : 0;
    });
    static constexpr BytePermutation kTokens =
        MakeBytePermutation([](int i) { return i / 32 * 32 + i % 4 * 8 + i / 4 % 8; });
    const TrellisLevelLookup<kBits> levels;
    const __m512i strings = _mm512_load_si512(kStrings.bytes), tokens = _mm512_load_si512(kTokens.bytes);
    const __m512i windows = Windows(0);
    const int64_t quad_bytes = int64_t{head_dim} * kBits / 2;
    constexpr unsigned kWords = (2U << (2 * kBits)) - 1U;  // of 16 codes and the byte after them
    for (; quad < end_quad; ++quad) {
      const uint8_t* bytes = codes + quad * quad_bytes;
      uint8_t* to = out + int64_t{quad} * 4 * head_dim;
      int32_t first;
      __builtin_memcpy(&first, bytes, sizeof first);
      for (int channel = 0; channel < head_dim; channel += 16, bytes += 8 * kBits, to += 64) {
        const int left = head_dim - channel;
        __m512i words;
        if (left > 16) {
          words = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(kWords), bytes);
        } else {  // the string ends, and begins again
          const unsigned last = left == 16 ? 2 * kBits : kBits;
          words = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << last) - 1U), bytes);
          words = _mm512_mask_set1_epi32(words, static_cast<__mmask16>(1U << last), first);
        }
        const __m512i string = _mm512_permutexvar_epi8(strings, words);
        const __m512i found = levels(_mm512_multishift_epi64_epi8(windows, string));
        const __m512i line = _mm512_permutexvar_epi8(tokens, found);
        if (left >= 16) {
          _mm512_storeu_si512(to, line);
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(line));
        }
      }
    }
  }
};

// Sources of metrics[w >> bits] for the 32 windows of a register, from the register of metrics that has them.
struct Spreads {
  alignas(64) int16_t lanes[8][32];
};
constexpr Spreads MakeSpreads(int bits) {
  Spreads spreads{};
  for (int w = 0; w < 256; ++w) spreads.lanes[w / 32][w % 32] = static_cast<int16_t>((w >> bits) % 32);
  return spreads;
}

template <int kBits>
struct TrellisSteps {
  static constexpr int kTargets = 256 >> kBits;
  static constexpr int kVectors = kTargets > 32 ? kTargets / 32 : 1;  // of metrics; at 4 bits in both halves of one
  static constexpr int kCandidates = 8 / kVectors;

  struct Candidate {
    __m512i cost, choice;
  };
  static KVANTA_INLINE __m512i Load(const int16_t* p) { return _mm512_load_si512(p); }

  // The lower cost, of equal ones the first.
  static KVANTA_INLINE Candidate Better(const Candidate& a, const Candidate& b) {
    const auto first = _mm512_cmpge_epi16_mask(b.cost, a.cost);
    return {_mm512_min_epi16(a.cost, b.cost), _mm512_mask_mov_epi16(b.choice, first, a.choice)};
  }
  template <int kFirst, int kCount, class CandidateOf>
  static KVANTA_INLINE Candidate BestOf(CandidateOf candidate_of) {
    if constexpr (kCount == 1) {
      return candidate_of(kFirst);
    } else {
      return Better(BestOf<kFirst, kCount / 2>(candidate_of), BestOf<kFirst + kCount / 2, kCount / 2>(candidate_of));
    }
  }
  // At 4 bits: the better of the halves, in both of them. Choices are the lowest of a half; of equal costs the lower.
  static KVANTA_INLINE Candidate BetterHalf(const Candidate& x) {
    const __m512i cost = _mm512_shuffle_i32x4(x.cost, x.cost, 0x4e),
                  choice = _mm512_shuffle_i32x4(x.choice, x.choice, 0x4e);
    const auto own = ~_mm512_cmpge_epi16_mask(x.cost, cost) |
                     (_mm512_cmpge_epi16_mask(cost, x.cost) & _mm512_cmpge_epi16_mask(choice, x.choice));
    return {_mm512_min_epi16(x.cost, cost), _mm512_mask_mov_epi16(choice, own, x.choice)};
  }

  static KVANTA_INLINE int16_t MinimumOf(const __m512i* metrics) {
    __m512i all = metrics[0];
    for (int v = 1; v < kVectors; ++v) all = _mm512_min_epi16(all, metrics[v]);
    const __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    const __m128i quarter = _mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i sign = _mm_set1_epi16(-0x8000);
    const __m128i minimum = _mm_minpos_epu16(_mm_xor_si128(quarter, sign));
    return static_cast<int16_t>(_mm_cvtsi128_si32(_mm_xor_si128(minimum, sign)));
  }

  // 32 metrics, or 16 in both halves.
  static KVANTA_INLINE __m512i LoadTargets(const int16_t* p) {
    if constexpr (kTargets >= 32) return Load(p);
    return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static KVANTA_INLINE void StoreTargets(int16_t* p, __m512i x) {
    if constexpr (kTargets >= 32) {
      _mm512_store_si512(p, x);
    } else {
      _mm256_store_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(x));
    }
  }

  static void Run(const int16_t* targets, int count, int16_t* metrics, int16_t* decisions) {
    static constexpr Spreads kSpreads = MakeSpreads(kBits);
    const TrellisTables& tables = kTrellisTables<kBits>;
    __m512i metric[kVectors];
    for (int v = 0; v < kVectors; ++v) metric[v] = LoadTargets(metrics + 32 * v);
    for (int step = 1; step <= count; ++step) {
      const int element = count - step;
      const int32_t q = targets[element];
      const __m512i target = _mm512_set1_epi16(targets[element]);
      __m512i next[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        Candidate best = BestOf<0, kCandidates>([&](int candidate) __attribute__((always_inline)) {
          const int i = candidate * kVectors + v;  // windows 32 i to 32 i + 31
          const __m512i spread =
              _mm512_permutexvar_epi16(Load(kSpreads.lanes[i]), metric[kVectors == 1 ? 0 : i / (8 / kVectors)]);
          const __m512i product = _mm512_mulhrs_epi16(target, Load(tables.level + 32 * i));
          const __m512i cost = _mm512_adds_epi16(_mm512_subs_epi16(spread, product), Load(tables.square + 32 * i));
          const auto choice = static_cast<int16_t>(32 * i >> (8 - kBits));
          if constexpr (kTargets >= 32) return Candidate{cost, _mm512_set1_epi16(choice)};
          return Candidate{cost, _mm512_mask_mov_epi16(_mm512_set1_epi16(choice), 0xffff0000U,
                                                       _mm512_set1_epi16(static_cast<int16_t>(choice + 1)))};
        });
        if constexpr (kTargets < 32) best = BetterHalf(best);
        StoreTargets(decisions + element * kTargets + 32 * v, best.choice);
        next[v] = best.cost;
      }
      const __m512i square = _mm512_set1_epi16(static_cast<int16_t>((q * q + (1 << 14)) >> 15));
      for (int v = 0; v < kVectors; ++v) metric[v] = _mm512_adds_epi16(next[v], square);
      if (step % formats::kReducedSteps == 0) {
        const __m512i minimum = _mm512_set1_epi16(MinimumOf(metric));
        for (int v = 0; v < kVectors; ++v) metric[v] = _mm512_subs_epi16(metric[v], minimum);
      }
    }
    for (int v = 0; v < kVectors; ++v) StoreTargets(metrics + 32 * v, metric[v]);
  }
};

void SearchTrellisCodes(int bits, const int16_t* targets, int head_dim, uint8_t* codes) noexcept {
  formats::SearchTrellis<TrellisSteps>(bits, targets, head_dim, codes);
}
constexpr formats::TrellisSearch kTrellisSearch = SearchTrellisCodes;

}  // namespace
}  // namespace kvanta::kernels
