// Search for trellis codes on AVX2: 16 windows to a register. Codes are decoded one by one (trellis_unpack.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats/trellis_search.h"
#include "kernels/attention/cpu/trellis_tables.h"
#include "kernels/attention/cpu/trellis_unpack.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

template <int kBits>
struct TrellisSteps {
  static constexpr int kTargets = 256 >> kBits;
  static constexpr int kVectors = kTargets / 16;  // vectors of metrics
  static constexpr int kChoices = 1 << kBits;

  struct Candidate {
    __m256i cost, choice;
  };
  static KVANTA_INLINE __m256i Load(const int16_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static KVANTA_INLINE void Store(int16_t* p, __m256i x) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), x); }

  // metrics[w >> kBits] of windows 16 i to 16 i + 15.
  static KVANTA_INLINE __m256i Spread(const int16_t* metrics, int i) {
    if constexpr (kBits == 4) return _mm256_set1_epi16(metrics[i]);
    if constexpr (kBits == 3) {
      int32_t two;
      __builtin_memcpy(&two, metrics + 2 * i, sizeof two);
      return _mm256_shuffle_epi8(_mm256_set1_epi32(two),
                                 _mm256_setr_m128i(_mm_set1_epi16(0x0100), _mm_set1_epi16(0x0302)));
    }
    int64_t four;
    __builtin_memcpy(&four, metrics + 4 * i, sizeof four);
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(four),
                               _mm256_setr_epi16(0x0100, 0x0100, 0x0100, 0x0100, 0x0302, 0x0302, 0x0302, 0x0302, 0x0504,
                                                 0x0504, 0x0504, 0x0504, 0x0706, 0x0706, 0x0706, 0x0706));
  }

  // The lower cost, of equal ones the first.
  static KVANTA_INLINE Candidate Better(const Candidate& a, const Candidate& b) {
    const __m256i second = _mm256_cmpgt_epi16(a.cost, b.cost);
    return {_mm256_min_epi16(a.cost, b.cost), _mm256_blendv_epi8(a.choice, b.choice, second)};
  }

  template <int kFirst, int kCount, class CostOf>
  static KVANTA_INLINE Candidate BestOf(CostOf cost_of) {
    if constexpr (kCount == 1) {
      return {cost_of(kFirst), _mm256_set1_epi16(kFirst)};
    } else {
      return Better(BestOf<kFirst, kCount / 2>(cost_of), BestOf<kFirst + kCount / 2, kCount / 2>(cost_of));
    }
  }

  static KVANTA_INLINE int16_t MinimumOf(const __m256i* metrics) {
    __m256i all = metrics[0];
    for (int v = 1; v < kVectors; ++v) all = _mm256_min_epi16(all, metrics[v]);
    const __m128i sign = _mm_set1_epi16(-0x8000);
    const __m128i half = _mm_min_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const __m128i minimum = _mm_minpos_epu16(_mm_xor_si128(half, sign));
    return static_cast<int16_t>(_mm_cvtsi128_si32(_mm_xor_si128(minimum, sign)));
  }

  static void Run(const int16_t* targets, int count, int16_t* metrics, int16_t* decisions) {
    const TrellisTables& tables = kTrellisTables<kBits>;
    for (int step = 1; step <= count; ++step) {
      const int element = count - step;
      const int32_t q = targets[element];
      const __m256i target = _mm256_set1_epi16(targets[element]);
      __m256i next[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const Candidate best = BestOf<0, kChoices>([&](int choice) __attribute__((always_inline)) {
          const int i = choice * kVectors + v;
          const __m256i product = _mm256_mulhrs_epi16(target, Load(tables.level + 16 * i));
          return _mm256_adds_epi16(_mm256_subs_epi16(Spread(metrics, i), product), Load(tables.square + 16 * i));
        });
        Store(decisions + element * kTargets + 16 * v, best.choice);
        next[v] = best.cost;
      }
      const __m256i square = _mm256_set1_epi16(static_cast<int16_t>((q * q + (1 << 14)) >> 15));
      for (int v = 0; v < kVectors; ++v) next[v] = _mm256_adds_epi16(next[v], square);
      if (step % formats::kReducedSteps == 0) {
        const __m256i minimum = _mm256_set1_epi16(MinimumOf(next));
        for (int v = 0; v < kVectors; ++v) next[v] = _mm256_subs_epi16(next[v], minimum);
      }
      for (int v = 0; v < kVectors; ++v) Store(metrics + 16 * v, next[v]);
    }
  }
};

void SearchTrellisCodes(int bits, const int16_t* targets, int head_dim, uint8_t* codes) noexcept {
  formats::SearchTrellis<TrellisSteps>(bits, targets, head_dim, codes);
}
constexpr formats::TrellisSearch kTrellisSearch = SearchTrellisCodes;

}  // namespace
}  // namespace kvanta::kernels
