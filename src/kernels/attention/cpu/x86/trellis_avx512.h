// Trellis codes on AVX-512 VBMI: vpmultishiftqb takes the windows of 64 codes, and two look-ups of 128 entries their
// levels, in the order in which vpdpbusd multiplies them. The search has 32 windows to a register.
#pragma once

#include <cstdint>

#include "formats/trellis_levels.h"
#include "formats/trellis_search.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/attention/cpu/trellis_tables.h"
#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/x86/vec16_avx512.h"

namespace kvanta::kernels {
namespace {

// Rows that share codes decoded in registers; more rows share those in the workspace.
inline constexpr int kMaxFusedRows = kQueryTile;

// Bytes [64] of a permutation or of a control of vpmultishiftqb, f(i) byte i.
struct BytePermutation {
  alignas(64) uint8_t bytes[64];
};
template <class F>
constexpr BytePermutation MakeBytePermutation(F f) {
  BytePermutation permutation{};
  for (int i = 0; i < 64; ++i) permutation.bytes[i] = static_cast<uint8_t>(f(i));
  return permutation;
}

// Levels + offset, by window.
struct LevelBytes {
  alignas(64) uint8_t bytes[256];
};
constexpr LevelBytes MakeLevelBytes(const formats::TrellisLevelTable& table, int offset) {
  LevelBytes result{};
  // NOLINTNEXTLINE(bugprone-signed-char-misuse): a level is a number
  for (int w = 0; w < 256; ++w) result.bytes[w] = static_cast<uint8_t>(table.levels[w] + offset);
  return result;
}

class LevelLookup {
 public:
  explicit KVANTA_INLINE LevelLookup(const LevelBytes& levels) {
    for (int i = 0; i < 4; ++i) tables_[i] = _mm512_load_si512(levels.bytes + 64 * i);
  }
  KVANTA_INLINE __m512i operator()(__m512i windows) const {
    const __m512i low = _mm512_permutex2var_epi8(tables_[0], windows, tables_[1]);
    const __m512i high = _mm512_permutex2var_epi8(tables_[2], windows, tables_[3]);
    return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(windows), high);
  }

 private:
  __m512i tables_[4];
};

// ---- keys: a line is four windows of each of 16 tokens, [16 tokens][4]

// Control of vpmultishiftqb for a line whose first window begins at bit 0 of each word, for codes of `bits` bits.
constexpr uint64_t LineWindows(int bits) {
  uint64_t control = 0;
  for (int i = 0; i < 8; ++i) control |= static_cast<uint64_t>(bits * (i % 4) + 32 * (i / 4)) << (8 * i);
  return control;
}

// The bytes of a line's windows, the first of which begins at bit `first` of `words`, 4 bytes of each of 16 tokens'
// strings; `next` are the 4 bytes that follow, null if no window reaches them. The strings of the two tokens of a qword
// are laid out in a circle, in which each goes on for 32 bits from byte first / 8 on:
//
//   | next, odd token | words, even token | next, even token | words, odd token |
//   0            first / 8                4            4 + first / 8            8
KVANTA_INLINE __m512i WindowsOfLine(const uint8_t* words, const uint8_t* next, int first, uint64_t line_windows) {
  static constexpr BytePermutation kOtherToken = MakeBytePermutation([](int i) { return i ^ 4; });
  __m512i strings = _mm512_loadu_si512(words);
  if (next != nullptr) {
    const unsigned next_bytes = (1U << static_cast<unsigned>(first / 8)) - 1;
    strings = _mm512_mask_shuffle_epi8(strings, uint64_t{0x1111111111111111} * next_bytes, _mm512_loadu_si512(next),
                                       _mm512_load_si512(kOtherToken.bytes));
  }
  const uint64_t control = line_windows + uint64_t{0x0101010101010101} * static_cast<unsigned>(first);
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(control)), strings);
}

// Stores the lines of a group of 16 tokens as Keys::Decoder reads them.
template <class Keys>
KVANTA_INLINE void UnpackLines(const Keys& keys, const uint8_t* group, uint8_t* out) {
  keys.template ForLines<1>(
      group, 0, [&](int line, const __m512i* codes) __attribute__((always_inline)) {
        _mm512_storeu_si512(out + line * 64, Keys::Decoder::AddOffset(codes[0]));
      });
}

// Dot products of kRows rows with kGroups groups of 16 tokens, group_bytes apart: sums[r * kGroups + g].
template <int kGroups, int kRows, class Keys>
KVANTA_INLINE void DotLines(const Keys& keys, const uint8_t* group, int64_t group_bytes, const uint8_t* const* operands,
                            const int32_t* bias, Vec16::F* sums, Prefetcher& prefetch) {
  ByteSums<typename Keys::Decoder, kGroups, kRows> products(bias);
  keys.template ForLines<kGroups>(
      group, group_bytes, [&](int line, const __m512i* codes) __attribute__((always_inline)) {
        prefetch.Step();
        products.Add(operands, line, codes);
      });
  products.Store(sums);
}

template <int kBits>
class TrellisKeys {
 public:
  using Decoder = CodeInt8x8;

  explicit KVANTA_INLINE TrellisKeys(int head_dim) : head_dim_(head_dim) {}

  int Lines() const { return head_dim_ / 4; }

  void Unpack(const uint8_t* group, uint8_t* out) const { UnpackLines(*this, group, out); }

  template <int kGroups, int kRows>
  KVANTA_INLINE void Dot(const uint8_t* group, int64_t group_bytes, const uint8_t* const* operands, const int32_t* bias,
                         Vec16::F* sums, Prefetcher& prefetch) const {
    DotLines<kGroups, kRows>(*this, group, group_bytes, operands, bias, sums, prefetch);
  }

  // Calls f(line, codes [kGroups]) for the lines of each group.
  template <int kGroups, class F>
  KVANTA_INLINE void ForLines(const uint8_t* group, int64_t group_bytes, F f) const {
    static constexpr LevelBytes kLevels =
        MakeLevelBytes(formats::kTrellisLevels[kBits - formats::kMinTrellisBits], CodeInt8x8::kOffset);
    constexpr int kLines = kBits == 3 ? 8 : 8 / kBits;  // lines that fill whole words
    constexpr int kWords = kLines * kBits / 8;
    const LevelLookup levels(kLevels);
    const uint8_t* words = group;
    for (int first_line = 0; first_line < head_dim_ / 4; first_line += kLines, words += 64 * kWords) {
      const bool ends = first_line + kLines == head_dim_ / 4;  // and begins again
      const uint8_t* after = ends ? group : words + 64 * kWords;
#pragma GCC unroll 8
      for (int line = 0; line < kLines; ++line) {
        const int word = line * kBits / 8, first = line * kBits % 8 * 4;
        const bool within = first + 3 * kBits + 8 <= 32;
        const uint8_t* next = word + 1 < kWords ? words + 64 * (word + 1) : after;
        __m512i codes[kGroups];
        for (int g = 0; g < kGroups; ++g) {
          codes[g] = levels(WindowsOfLine(words + 64 * word + g * group_bytes,
                                          within ? nullptr : next + g * group_bytes, first, LineWindows(kBits)));
        }
        f(first_line + line, codes);
      }
    }
  }

 private:
  int head_dim_;
};

// ---- values: a line is 16 channels of four tokens, [16 channels][4]

template <int kBits>
class TrellisValues {
 public:
  static constexpr bool kInteger = true;
  static constexpr int kSub = 4;
  static constexpr int kOperandBytes = CodeInt8x8Values::kOperandBytes;
  static constexpr int kChannels = 16;
  static constexpr int kUnroll = 2;  // lines at a time, which share the probabilities and hide the latency of sums

  // Decodes tokens [4 quad, 4 end_quad) of a cell, to their places in the order of int8 values: [quad][head_dim][4].
  static void Unpack(const uint8_t* codes, int head_dim, int quad, int end_quad, uint8_t* out) {
    const TrellisValues values;
    for (; quad < end_quad; ++quad) {
      const uint8_t* row = codes + int64_t{quad} * head_dim * kBits / 2;
      uint8_t* to = out + int64_t{quad} * head_dim * 4;
      for (int channel = 0; channel < head_dim; channel += 16, to += 64) {
        const __m512i line = values.Decode(WordsOf(row, channel, head_dim));
        if (head_dim - channel >= 16) {
          _mm512_storeu_si512(to, line);
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(line));
        }
      }
    }
  }

  // As SubbyteValue::DotValues, but that the probabilities of rows are kProbRowBytes<1> apart.
  template <int kRows, bool kTail, int kCount>
  static KVANTA_INLINE void DotValues(const uint8_t* words, int head_dim, int column, int count,
                                      const uint8_t* const* probs, const uint8_t* const* /*signs*/,
                                      const int32_t* const* /*initial*/, Vec16::F* dots, Prefetcher& prefetch) {
    const TrellisValues values;
    const int64_t stride = int64_t{head_dim} * kBits / 2;
    __m512i sums[kRows * kCount];
    for (int i = 0; i < kRows * kCount; ++i) sums[i] = _mm512_setzero_si512();
    const uint8_t* four = probs[0];  // the same for all channels
    for (int i = 0; i < count; ++i, words += stride, four += 4) {
      prefetch.Step();
      __m512i codes[kCount];
      for (int c = 0; c < kCount; ++c) codes[c] = values.Decode(WordsOf(words, column + 16 * c, head_dim));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i prob = Broadcast32(four + r * kProbRowBytes<1>);
        for (int c = 0; c < kCount; ++c) sums[r * kCount + c] = DotBytes(sums[r * kCount + c], prob, codes[c]);
      }
    }
    for (int i = 0; i < kRows * kCount; ++i) dots[i] = _mm512_cvtepi32_ps(sums[i]);
  }

 private:
  // Pairs of channels are within two bytes of a token's string: a qword has two bytes of each of four
  // tokens, and its windows are in order; else a qword has the string of 8 channels of a token.
  static constexpr bool kPairs = kBits != 3;
  static constexpr LevelBytes kLevels =
      MakeLevelBytes(formats::kTrellisLevels[kBits - formats::kMinTrellisBits], CodeInt8x8Values::kOffset);
  static constexpr BytePermutation kStrings = MakeBytePermutation([](int i) {
    const int byte = kPairs ? 2 * kBits * (i / 8) / 8 + i % 2 : kBits * (i / 32) + i % 8;
    const int token = kPairs ? i / 2 % 4 : i / 8 % 4;
    return byte <= 2 * kBits ? 4 * byte + token : 0;
  });
  static constexpr BytePermutation kWindows = MakeBytePermutation(
      [](int i) { return kPairs ? 2 * kBits * (i / 8) % 8 + kBits * (i % 8 / 4) + 16 * (i % 4) : kBits * (i % 8); });
  static constexpr BytePermutation kTokens =  // 8 channels of a token
      MakeBytePermutation([](int i) { return i / 32 * 32 + i % 4 * 8 + i / 4 % 8; });

  KVANTA_INLINE TrellisValues()
      : levels_(kLevels),
        strings_(_mm512_load_si512(kStrings.bytes)),
        windows_(_mm512_load_si512(kWindows.bytes)),
        tokens_(_mm512_load_si512(kTokens.bytes)) {}

  // The words of 16 channels from `channel` on, a byte of each of four tokens, and the word after them: of the last
  // channels it is the first of the row.
  static KVANTA_INLINE __m512i WordsOf(const uint8_t* row, int channel, int head_dim) {
    const uint8_t* words = row + int64_t{channel} * kBits / 2;
    const int left = head_dim - channel;
    if (left > 16) return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((2U << (2 * kBits)) - 1U), words);
    const int count = left == 16 ? 2 * kBits : kBits;
    int32_t first;
    __builtin_memcpy(&first, row, sizeof first);
    const __m512i last = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << count) - 1U), words);
    return _mm512_mask_set1_epi32(last, static_cast<__mmask16>(1U << count), first);
  }

  KVANTA_INLINE __m512i Decode(__m512i words) const {
    const __m512i strings = _mm512_permutexvar_epi8(strings_, words);
    const __m512i codes = levels_(_mm512_multishift_epi64_epi8(windows_, strings));
    return kPairs ? codes : _mm512_permutexvar_epi8(tokens_, codes);
  }

  LevelLookup levels_;
  __m512i strings_, windows_, tokens_;
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
  static constexpr int kVectors = kTargets > 32 ? kTargets / 32 : 1;  // metrics; at 4 bits in both halves of one
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
