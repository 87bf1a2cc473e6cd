// Keys with uneven bits on AVX-512 VBMI: a qword holds the codes of 8 channels of a token and what their windows take
// from the codes that follow; vpmultishiftqb and two look-ups of 128 entries as in trellis_avx512.h. The search has 32
// windows to a register.
#pragma once

#include <cstdint>

#include "formats/klt.h"
#include "formats/klt_levels.h"
#include "formats/klt_search.h"
#include "kernels/attention/cpu/x86/trellis_avx512.h"

namespace kvanta::kernels {
namespace {

// A copy of the unit's own: a linker could give others a shared symbol that was compiled for these instructions.
constexpr formats::KltLevels kUnitKltLevels = formats::MakeKltLevels();

// Decodes a group of 16 tokens to the order of int8 keys: [head_dim / 4][16 tokens][4].
void UnpackKltKeys(const formats::BitAllocation& allocation, const uint8_t* group, uint8_t* out) {
  static constexpr WordPermutation kPairs = MakeWordPermutation([](int i) { return i / 2 + i % 2 * 16; });
  static constexpr WordPermutation kEven = MakeWordPermutation([](int i) { return 2 * i; });
  const __m512i pairs = _mm512_load_si512(kPairs.words), eight = _mm512_set1_epi32(8);
  const __m512i even = _mm512_load_si512(kEven.words), odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  const __m512i zero = _mm512_setzero_si512();
  int row_bytes = 0, string_byte = 0;  // of a row; the first of its circular string
  for (int block = 0; block < allocation.coded_blocks; ++block) {
    row_bytes += allocation.bits[block];
    string_byte += block < allocation.scalar_blocks ? allocation.bits[block] : 0;
  }
  const int last_unit = row_bytes / 4 - 1;  // a word of 16 tokens
  const auto words_of = [&](int unit) __attribute__((always_inline)) {
    return _mm512_loadu_si512(group + (unit < last_unit ? unit : last_unit) * 64);
  };
  int byte = 0;
  for (int block = 0; block < allocation.head_dim / formats::kAllocationBlock; ++block, out += 128) {
    const int bits = allocation.bits[block];
    if (bits == 0) {
      _mm512_storeu_si512(out, zero);
      _mm512_storeu_si512(out + 64, zero);
      continue;
    }
    const int unit = byte / 4;
    const __m512i first = words_of(unit), second = words_of(unit + 1), third = words_of(unit + 2);
    const __m128i right = _mm_cvtsi32_si128(byte % 4 * 8), left = _mm_cvtsi32_si128(64 - byte % 4 * 8);
    const bool ends = block + 1 == allocation.coded_blocks && bits <= formats::kMaxAllocatedTrellis;
    const __m512i begin = words_of(string_byte / 4);
    const __m128i to_begin = _mm_cvtsi32_si128(string_byte % 4 * 8), to_end = _mm_cvtsi32_si128(8 * bits);
    const __m512i own = _mm512_set1_epi64(static_cast<int64_t>((uint64_t{1} << (8 * bits)) - 1));
    uint64_t shifts = 0;
    for (int i = 0; i < 8; ++i) shifts |= static_cast<uint64_t>(bits * i) << (8 * i);
    const __m512i windows = _mm512_set1_epi64(static_cast<int64_t>(shifts));
    const int8_t* table = kUnitKltLevels[bits].levels;
    const __m512i tables[4] = {_mm512_load_si512(table), _mm512_load_si512(table + 64), _mm512_load_si512(table + 128),
                               _mm512_load_si512(table + 192)};
    const auto levels_of = [&](__m512i index) __attribute__((always_inline)) {
      const __m512i low = _mm512_permutex2var_epi32(first, index, second);
      const __m512i high = _mm512_permutex2var_epi32(third, index, zero);
      __m512i string = _mm512_or_si512(_mm512_srl_epi64(low, right), _mm512_sll_epi64(high, left));
      if (ends) {
        const __m512i next = _mm512_srl_epi64(_mm512_permutex2var_epi32(begin, index, zero), to_begin);
        string = _mm512_or_si512(_mm512_and_si512(string, own), _mm512_sll_epi64(next, to_end));
      }
      const __m512i found = _mm512_multishift_epi64_epi8(windows, string);
      return _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(tables[0], found, tables[1]), _mm512_movepi8_mask(found),
                                  _mm512_permutex2var_epi8(tables[2], found, tables[3]));
    };
    const __m512i low = levels_of(pairs), high = levels_of(_mm512_add_epi32(pairs, eight));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32(low, even, high));
    _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi32(low, odd, high));
    byte += bits;
  }
}

struct KltLevelWords {
  alignas(64) int16_t level[256];  // in the unit of targets
};
constexpr KltLevelWords MakeKltLevelWords(int bits) {
  KltLevelWords words{};
  for (int w = 0; w < 256; ++w) {
    words.level[w] = static_cast<int16_t>(kUnitKltLevels[bits].levels[w] * formats::kKltUnit);
  }
  return words;
}

struct KltSteps {
  struct Candidate {
    __m512i metric, choice;
  };
  static KVANTA_INLINE __m512i Choice(int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
  // The lower metric, of equal ones the first.
  static KVANTA_INLINE Candidate Better(const Candidate& a, const Candidate& b) {
    const auto first = _mm512_cmpge_epi16_mask(b.metric, a.metric);
    return {_mm512_min_epi16(a.metric, b.metric), _mm512_mask_mov_epi16(b.choice, first, a.choice)};
  }

  template <int kBits>
  static KVANTA_INLINE void Run(const int16_t* targets, const int16_t* gains, int16_t* metrics, int16_t* decisions) {
    static constexpr Spreads kSpreads = MakeSpreads(kBits);
    static constexpr KltLevelWords kLevels = MakeKltLevelWords(kBits);
    constexpr int kTargets = 256 >> kBits;
    constexpr int kVectors = kTargets > 32 ? kTargets / 32 : 1;  // of best metrics; at 4 bits in both halves of one
    __m512i metric[8];
    for (int i = 0; i < 8; ++i) metric[i] = _mm512_load_si512(metrics + 32 * i);
    for (int element = formats::kAllocationBlock - 1; element >= 0; --element) {
      int16_t* decision = decisions + element * formats::kKltDecisions;
      Candidate best[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const auto candidate = [&](int i) __attribute__((always_inline)) {  // register i * kVectors + v
          const int x = 32 * kVectors * i >> (8 - kBits);
          if constexpr (kTargets >= 32) return Candidate{metric[i * kVectors + v], Choice(x)};
          return Candidate{metric[i], _mm512_mask_mov_epi16(Choice(x), 0xffff0000U, Choice(x + 1))};
        };
        best[v] = candidate(0);
        for (int i = 1; i < 8 / kVectors; ++i) best[v] = Better(best[v], candidate(i));
        if constexpr (kTargets < 32) {  // the better of the halves, of equal ones the lower choice
          const Candidate other{_mm512_shuffle_i32x4(best[v].metric, best[v].metric, 0x4e),
                                _mm512_shuffle_i32x4(best[v].choice, best[v].choice, 0x4e)};
          const auto own = _mm512_cmpgt_epi16_mask(other.metric, best[v].metric) |
                           (_mm512_cmpeq_epi16_mask(other.metric, best[v].metric) &
                            _mm512_cmpge_epi16_mask(other.choice, best[v].choice));
          best[v] = {_mm512_min_epi16(best[v].metric, other.metric),
                     _mm512_mask_mov_epi16(other.choice, own, best[v].choice)};
          _mm256_store_si256(reinterpret_cast<__m256i*>(decision), _mm512_castsi512_si256(best[v].choice));
        } else {
          _mm512_store_si512(decision + 32 * v, best[v].choice);
        }
      }
      const __m512i target = _mm512_set1_epi16(targets[element]), gain = _mm512_set1_epi16(gains[element]);
      for (int i = 0; i < 8; ++i) {
        const __m512i spread = _mm512_permutexvar_epi16(_mm512_load_si512(kSpreads.lanes[i]),
                                                        best[kVectors == 1 ? 0 : i / (8 / kVectors)].metric);
        __m512i error = _mm512_mulhrs_epi16(_mm512_sub_epi16(target, _mm512_load_si512(kLevels.level + 32 * i)), gain);
        for (int doubling = 0; doubling < 3; ++doubling) error = _mm512_adds_epi16(error, error);
        metric[i] = _mm512_adds_epi16(spread, _mm512_mulhi_epi16(error, error));
      }
    }
    __m512i minimum = metric[0];
    for (int i = 1; i < 8; ++i) minimum = _mm512_min_epi16(minimum, metric[i]);
    const __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(minimum), _mm512_extracti64x4_epi64(minimum, 1));
    const __m128i sign = _mm_set1_epi16(-0x8000);
    const __m128i quarter = _mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i smallest = _mm_xor_si128(_mm_minpos_epu16(_mm_xor_si128(quarter, sign)), sign);
    const __m512i reduction = _mm512_broadcastw_epi16(smallest);
    for (int i = 0; i < 8; ++i) _mm512_store_si512(metrics + 32 * i, _mm512_subs_epi16(metric[i], reduction));
  }
};

void SearchKltCodes(const formats::BitAllocation& allocation, const int16_t* targets, uint8_t* codes) noexcept {
  formats::SearchKlt<KltSteps>(allocation, targets, codes);
}
constexpr formats::KltSearch kKltSearch = SearchKltCodes;

}  // namespace
}  // namespace kvanta::kernels
