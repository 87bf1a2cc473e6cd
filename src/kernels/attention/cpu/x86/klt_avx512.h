// Keys with uneven bits on AVX-512 VBMI: decoded line by line as in trellis_avx512.h. The search has 32 windows to a
// register.
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

struct KltLineTables {
  LevelBytes levels[formats::kMaxAllocatedBits + 1];
  uint64_t windows[formats::kMaxAllocatedBits + 1];  // LineWindows()
};
constexpr KltLineTables MakeKltLineTables() {
  KltLineTables tables{};
  for (int bits = 0; bits <= formats::kMaxAllocatedBits; ++bits) {
    tables.levels[bits] = MakeLevelBytes(kUnitKltLevels[bits], CodeInt8::kOffset);
    tables.windows[bits] = LineWindows(bits);
  }
  return tables;
}
constexpr KltLineTables kKltLineTables = MakeKltLineTables();

class KltKeys {
 public:
  using Decoder = CodeInt8;  // queries are as uneven as the channels: 8 bits would be too coarse for most of them

  explicit KltKeys(const formats::BlockBits& allocation) : allocation_(allocation) {
    for (int block = 0; block < allocation.coded_blocks; ++block) {
      row_bytes_ += allocation.bits[block];
      string_byte_ += block < allocation.scalar_blocks ? allocation.bits[block] : 0;
    }
  }

  int Lines() const { return 2 * allocation_.coded_blocks; }  // lines that have codes

  void Unpack(const uint8_t* group, uint8_t* out) const {
    UnpackLines(*this, group, out);
    for (int line = Lines(); line < allocation_.head_dim / 4; ++line) {
      _mm512_storeu_si512(out + line * 64, _mm512_setzero_si512());
    }
  }

  template <int kGroups, int kRows>
  KVANTA_INLINE void Dot(const uint8_t* group, int64_t group_bytes, const uint8_t* const* operands, const int32_t* bias,
                         Vec16::F* sums, Prefetcher& prefetch) const {
    int32_t coded_bias[4];
    BiasOfCoded<kRows>(operands, bias, coded_bias);
    DotLines<kGroups, kRows>(*this, group, group_bytes, operands, coded_bias, sums, prefetch);
  }

  // Calls f(line, codes [kGroups]) for the lines of each group that have codes.
  template <int kGroups, class F>
  KVANTA_INLINE void ForLines(const uint8_t* group, int64_t group_bytes, F f) const {
    const int last_word = row_bytes_ / 4 - 1;
    alignas(64) uint8_t begin[kGroups * 64];  // first words of the circular strings, repeated after the last words
    for (int g = 0; g < kGroups; ++g) {
      const __m512i words = _mm512_loadu_si512(group + g * group_bytes + string_byte_ / 4 * 64);
      _mm512_store_si512(begin + 64 * g, _mm512_srl_epi32(words, _mm_cvtsi32_si128(string_byte_ % 4 * 8)));
    }
    for (int block = 0, bit = 0; block < allocation_.coded_blocks; ++block) {
      const int bits = allocation_.bits[block];
      const LevelLookup levels(kKltLineTables.levels[bits]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half, bit += 4 * bits) {
        const int word = bit / 32;
        const bool ends = word == last_word;
        const uint8_t* words = group + word * 64;
        const uint8_t* next = ends ? begin : words + 64;
        const int64_t next_stride = ends ? 64 : group_bytes;
        __m512i codes[kGroups];
        for (int g = 0; g < kGroups; ++g) {
          codes[g] = levels(
              WindowsOfLine(words + g * group_bytes, next + g * next_stride, bit % 32, kKltLineTables.windows[bits]));
        }
        f(2 * block + half, codes);
      }
    }
  }

 private:
  // The bias of rows without the channels that have no codes.
  template <int kRows>
  KVANTA_INLINE void BiasOfCoded(const uint8_t* const* operands, const int32_t* bias, int32_t* coded_bias) const {
    const int end = allocation_.head_dim * Decoder::kOperandBytes;
    __m512i sums[4];
    for (__m512i& sum : sums) sum = _mm512_setzero_si512();
    for (int byte = Lines() * 4 * Decoder::kOperandBytes; byte < end; byte += 64) {
      const int left = end - byte;
      const auto words = static_cast<__mmask16>(left >= 64 ? 0xffffU : (1U << static_cast<unsigned>(left / 4)) - 1U);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = DotBytes(sums[r], _mm512_set1_epi8(1), _mm512_maskz_loadu_epi32(words, operands[r] + byte));
      }
    }
    const __m512i upper_first = _mm512_set1_epi64(8);  // shifts of the sums of upper and lower terms
    for (__m512i& sum : sums) sum = _mm512_sllv_epi32(sum, upper_first);
    Bytes16::SumsOf(sums, coded_bias);
    for (int r = 0; r < kRows; ++r) coded_bias[r] = bias[r] + Decoder::kOffset * coded_bias[r];
  }

  const formats::BlockBits& allocation_;
  int row_bytes_ = 0;
  int string_byte_ = 0;  // first byte of the circular string
};

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
    constexpr int kVectors = kTargets > 32 ? kTargets / 32 : 1;  // best metrics; at 4 bits in both halves of one
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
          // True where the other's metric is greater, or equal with no smaller choice. SIMDe has only this comparison.
          const auto own = _mm512_cmpge_epi16_mask(other.metric, best[v].metric) &
                           (~_mm512_cmpge_epi16_mask(best[v].metric, other.metric) |
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
